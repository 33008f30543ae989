#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep {

#if defined(__x86_64__)
namespace {

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned sub_leaf) {
  Leaf out;
  __get_cpuid_count(leaf, sub_leaf, &out.eax, &out.ebx, &out.ecx, &out.edx);
  return out;
}

bool bit(unsigned word, int index) { return ((word >> index) & 1u) != 0; }

/// Whether the operating system saves the tile registers when it switches threads: XCR0, bits 17 and 18.
bool system_saves_tiles() {
  if (!bit(cpuid(1, 0).ecx, 27)) return false;  // OSXSAVE
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return bit(low, 17) && bit(low, 18);
}

}  // namespace

CpuFeatures cpu_features() {
  __builtin_cpu_init();
  CpuFeatures out;
  out.avx2 = __builtin_cpu_supports("avx2");
  out.fma = __builtin_cpu_supports("fma");
  out.avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const Leaf seven = cpuid(7, 0);
  if (out.avx512) {
    out.avx512_vnni = bit(seven.ecx, 11);
    out.avx512_fp16 = bit(seven.edx, 23);
    out.avx512_bf16 = bit(cpuid(7, 1).eax, 5);
  }
  if (bit(seven.edx, 24) && system_saves_tiles()) {  // AMX-TILE
    out.amx_bf16 = bit(seven.edx, 22);
    out.amx_int8 = bit(seven.edx, 25);
  }
  return out;
}

std::string cpu_instruction_set() {
  const CpuFeatures cpu = cpu_features();
  if (cpu.avx512) return cpu.amx_bf16 ? "avx512_amx" : cpu.avx512_bf16 ? "avx512_bf16" : "avx512";
  return cpu.avx2 && cpu.fma ? "avx2" : "sse2";
}
#else
CpuFeatures cpu_features() { return {}; }

std::string cpu_instruction_set() { return "generic"; }
#endif

}  // namespace lockstep
