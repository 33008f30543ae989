// What this CPU can do, how our own loops use it, and how compute threads share its cores with other programs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"

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

/// Note [Waiting beside busy neighbours]
/// OpenMP's threads wait for each other some forty times in a training step. libgomp's wait spins for milliseconds
/// before it sleeps, which is fastest where every thread has a core of its own. Where another program has taken a
/// thread's core, the others spin through their share of the processor while the one they wait for is out, and when it
/// returns they have used theirs up: the training runs twenty times slower, not half as fast. Two things repair it, and
/// neither changes what is computed or how many threads compute it:
/// - Waits sleep after kSpinMicroseconds. libgomp reads its setting before main(), so the program starts itself again
///   with it, which costs some 2 ms.
/// - A thread that wakes up runs soon: it asks Linux (6.12 or newer) for shorter time slices than other programs have,
///   which gives it the processor earlier, not more of it.

/// How long a thread may spin before it sleeps: several times what waking one up costs.
inline constexpr int kSpinMicroseconds = 100;

/// The value of GOMP_SPINCOUNT (rounds of libgomp's wait) for `processors` in the affinity mask. Nothing if libgomp is
/// to be left alone: GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, the process runs under Valgrind (which would lose it),
/// or it has only one processor, where libgomp does not spin.
std::optional<std::string> openmp_spin_count(const EnvLookup& lookup, int processors);

/// To be called first in main(), before there are threads: see the note. `argv` is the program's, ended by a null
/// pointer. Where the program cannot be started again it keeps libgomp's own setting.
void share_processors_well(char** argv);

}  // namespace lockstep

// Compiles a loop once for each instruction set and picks at load time. Sanitizers run before the pick is possible.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(LOCKSTEP_SANITIZED)
#define LOCKSTEP_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOCKSTEP_SIMD_CLONES
#endif
