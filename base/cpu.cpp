#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep {

std::string cpu_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    // Leaf 7, sub-leaf 0: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE; sub-leaf 1: EAX bit 5 is AVX512-BF16.
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 22)) != 0 && (d & (1u << 24)) != 0)
      return "avx512_amx";
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0) return "avx512_bf16";
    return "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
  return "sse2";
#else
  return "generic";
#endif
}

}  // namespace lockstep
