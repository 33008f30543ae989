// Several elements of memory at once, and the types that kernels are made for.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/cuda/device.cuh"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

/// `kWidth` elements that are read or written in one access, where that is at most 16 bytes. They lie at a multiple of
/// their size.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T of[kWidth];
};

template <int kCount>
struct Numbers {
  float of[kCount];
};

/// The most elements that one access of each of these types can have.
template <class... T>
constexpr int kVector = kVectorBytes / static_cast<int>(std::max({sizeof(T)...}));

/// Whether packs of `width` elements may lie at `data`. Nothing (nullptr) lies well.
template <class T>
bool fits_packs(const T* data, int width) {
  return reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * static_cast<std::size_t>(width)) == 0;
}

/// Calls run() with kWide, or with 1, as a constant.
template <int kWide, class F>
void with_width(bool wide, F&& run) {
  if (wide)
    run(std::integral_constant<int, kWide>{});
  else
    run(std::integral_constant<int, 1>{});
}

template <int kWidth, class T>
__device__ Pack<T, kWidth> load_pack(const T* at) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(at);
}
/// For what is not read again soon.
template <int kWidth, class T>
__device__ Pack<T, kWidth> load_last(const T* at) {
  if constexpr (sizeof(Pack<T, kWidth>) == kVectorBytes)
    return std::bit_cast<Pack<T, kWidth>>(load_streaming(reinterpret_cast<const uint4*>(at)));
  else
    return load_pack<kWidth>(at);
}
template <int kWidth, class T>
__device__ void store_pack(T* at, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(at) = pack;
}

// Note [Whole stores]
// Stores of structs nvcc 13 now and then takes apart, down to their elements: a warp's eight stores of 2 bytes, 16
// bytes apart, take eight times as many accesses to the second cache as one of 16. An integer of that size stays whole.

/// Rounds and stores a pack.
template <class T, int kWidth>
__device__ void store_rounded(T* at, const Numbers<kWidth>& values) {
  if constexpr (kWidth * sizeof(T) == kVectorBytes) {
    using Whole = unsigned __int128;
    constexpr int kEach = kWidth / 4;  // of a word
    Whole whole = 0;
    for (int k = kWidth - kEach; k >= 0; k -= kEach) {
      if constexpr (kEach == 2)
        whole = whole << 32 | pair_of<T>(values.of[k], values.of[k + 1]);
      else
        whole = whole << 32 | __float_as_uint(values.of[k]);
    }
    *reinterpret_cast<Whole*>(at) = whole;
  } else {
    Pack<T, kWidth> pack;
    for (int k = 0; k < kWidth; ++k) pack.of[k] = from_float<T>(values.of[k]);
    store_pack(at, pack);
  }
}

/// One element at a time: a thread has this many, a block's width apart, and calls body(i) for each.
constexpr int kElementsPerThread = 4;
template <class Body>
__device__ void for_own_elements(std::int64_t count, const Body& body) {
  const std::int64_t first = std::int64_t{blockIdx.x} * (kBlock * kElementsPerThread) + threadIdx.x;
  for (int k = 0; k < kElementsPerThread; ++k)
    if (const std::int64_t i = first + k * kBlock; i < count) body(i);
}
/// Starts kernel(count, args…), which does that.
template <class Kernel, class... Args>
void launch_each(const char* what, Kernel kernel, StreamView stream, std::int64_t count, Args... args) {
  if (count == 0) return;
  const std::int64_t blocks = ceil_div(count, kBlock * kElementsPerThread);
  LOCKSTEP_ASSERT(blocks <= kMostBlocks, "{} of {} elements", what, count);
  launch(what, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), stream, count, args...);
}

/// Calls run(float{}), run(BFloat16{}) or run(Float16{}), as `dtype` says.
template <class F>
void with_float_type(DType dtype, F&& run) {
  if (dtype == DType::kBF16) {
    run(BFloat16{});
  } else if (dtype == DType::kF16) {
    run(Float16{});
  } else {
    LOCKSTEP_ASSERT(dtype == DType::kF32, "a CUDA kernel for {}", name_of(dtype));
    run(float{});
  }
}

}  // namespace lockstep::nn::cuda
