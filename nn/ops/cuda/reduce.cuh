// Sums within a warp and within a block: always in the same order, and the same in all threads.
#pragma once

#include <limits>

#include "base/cuda/device.cuh"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int kSumBlock = 1024;  // threads of a block that adds up what all others have left

/// Of all lanes, which must all call it.
template <class T>
__device__ T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// Of all kThreads threads of the block, which must all call it.
template <int kThreads, class T>
__device__ T block_sum(T value) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);
  __shared__ T sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  value = warp_sum(value);
  __syncthreads();  // what a call before this one left has been read
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  return warp_sum(lane < kWarps ? sums[lane] : T{});
}

}  // namespace lockstep::nn::cuda
