// Elements of activations, f32 or bf16, in loops that compute in f32. Internal to nn/ops/cpu.
#pragma once

#include <bit>
#include <cstdint>

#include "lockstep/base/dtype.h"

namespace lockstep::nn::cpu {

// Kept in one piece with the loops that call them, which are compiled for several instruction sets.
[[gnu::always_inline]] inline float wide(float x) { return x; }
[[gnu::always_inline]] inline float wide(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// x as a T, to bf16 as BFloat16::from_float() rounds.
template <class T>
[[gnu::always_inline]] inline T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16, quiet = u >> 16 | 0x40u;
    return {static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
  }
}

/// x where `keep`, else 0. A choice between two structs is one that compilers do not vectorise.
[[gnu::always_inline]] inline float keep_if(bool keep, float x) { return keep ? x : 0.0f; }
[[gnu::always_inline]] inline BFloat16 keep_if(bool keep, BFloat16 x) {
  return {static_cast<std::uint16_t>(keep ? x.bits : 0)};
}

/// use(float()) or use(BFloat16()): for kernels of both types. Of other types the tensors themselves refuse their data.
template <class Use>
decltype(auto) with_type(DType dtype, const Use& use) {
  return dtype == DType::kBF16 ? use(BFloat16()) : use(float());
}

}  // namespace lockstep::nn::cpu
