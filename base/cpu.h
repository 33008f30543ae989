// What this CPU can do, and how our own loops use it.
#pragma once

#include <string>

namespace lockstep {

/// What programs may use of the CPU's instructions: both the CPU and the operating system offer it. All false where
/// the CPU is no x86-64.
struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool avx512 = false;  // F, BW and VL
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;
};
CpuFeatures cpu_features();

/// The widest of the instruction sets that numbers depend on: "avx512_amx", "avx512_bf16", "avx512", "avx2" or "sse2";
/// "generic" where the CPU is no x86-64. ONEDNN_MAX_CPU_ISA does not change it.
std::string cpu_instruction_set();

}  // namespace lockstep

// Compiles a loop once for each instruction set and picks at load time. Sanitizers run before the pick is possible.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(LOCKSTEP_SANITIZED)
#define LOCKSTEP_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOCKSTEP_SIMD_CLONES
#endif
