// Sums of products of pairs of bf16, as AVX512-BF16 has them. Internal to nn/ops/cpu.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/cpu.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::cpu {

/// Whether loops may use vdpbf16ps, which adds the products of two pairs of bf16 to a lane of f32. It reads numbers
/// below the normal ones as 0. Honours ONEDNN_MAX_CPU_ISA, so that everything in bf16 is computed in the same way.
inline bool multiplies_pairs() {
#if defined(__x86_64__)
  return cpu_features().avx512_bf16 && cpu_bf16() >= CpuBf16::kAvx512;
#else
  return false;
#endif
}

#if defined(__x86_64__)
/// Of functions that use it.
#define LOCKSTEP_AVX512_BF16 gnu::target("arch=x86-64-v4,avx512bf16")
#endif

}  // namespace lockstep::nn::cpu
