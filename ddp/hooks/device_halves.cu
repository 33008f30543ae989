#include "ddp/hooks/compression.h"

#include <algorithm>

#include "base/cuda/device.cuh"

namespace lockstep::ddp {
namespace {

constexpr int kBlock = 256;
constexpr std::size_t kMostBlocks = 1024;

/// The exponent of the power of two that gradients are multiplied with.
__device__ inline int scale_exponent(int largest, int log2_ranks) {
  const int above = (largest >> 23) - 126;  // the largest is below 2^above
  const int exponent = 15 - log2_ranks - above;
  return exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
}

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

template <class From, class To>
__global__ void __launch_bounds__(kBlock) convert(const From* from, To* to, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += stride)
    to[i] = from_float<To>(to_float(from[i]));
}

__global__ void __launch_bounds__(kBlock) find_largest(const float* from, int* largest, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kBlock;
  int mine = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += stride) {
    const int magnitude = static_cast<int>(__float_as_uint(from[i]) & 0x7fffffffu);
    mine = magnitude > mine ? magnitude : mine;
  }
  for (int lanes = warpSize / 2; lanes > 0; lanes /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, mine, lanes);
    mine = other > mine ? other : mine;
  }
  if (threadIdx.x % warpSize == 0) atomicMax(largest, mine);
}

__global__ void __launch_bounds__(kBlock)
    narrow_scaled(const float* from, const int* largest, int log2_ranks, Float16* to, std::int64_t count) {
  const float scale = power_of_two(scale_exponent(*largest, log2_ranks));
  const std::int64_t stride = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += stride)
    to[i] = from_float<Float16>(from[i] * scale);
}

__global__ void __launch_bounds__(kBlock)
    widen_scaled(const Float16* from, const int* largest, int log2_ranks, float* to, std::int64_t count) {
  const float scale = power_of_two(-scale_exponent(*largest, log2_ranks));
  const std::int64_t stride = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += stride)
    to[i] = to_float(from[i]) * scale;
}

dim3 blocks_for(std::size_t count) {
  return dim3(static_cast<unsigned>(std::min((count + kBlock - 1) / kBlock, kMostBlocks)));
}

}  // namespace

void narrow_on_device(const float* from, BFloat16* to, std::size_t count, StreamView stream) {
  launch("rounding gradients to bf16", convert<float, BFloat16>, blocks_for(count), dim3(kBlock), stream, from, to,
         static_cast<std::int64_t>(count));
}

void widen_on_device(const BFloat16* from, float* to, std::size_t count, StreamView stream) {
  launch("widening gradients of bf16", convert<BFloat16, float>, blocks_for(count), dim3(kBlock), stream, from, to,
         static_cast<std::int64_t>(count));
}

void largest_on_device(const float* from, std::int32_t* largest, std::size_t count, StreamView stream) {
  launch("the largest gradient", find_largest, blocks_for(count), dim3(kBlock), stream, from, largest,
         static_cast<std::int64_t>(count));
}

void narrow_on_device(const float* from, const std::int32_t* largest, int log2_ranks, Float16* to, std::size_t count,
                      StreamView stream) {
  launch("rounding gradients to f16", narrow_scaled, blocks_for(count), dim3(kBlock), stream, from, largest, log2_ranks,
         to, static_cast<std::int64_t>(count));
}

void widen_on_device(const Float16* from, const std::int32_t* largest, int log2_ranks, float* to, std::size_t count,
                     StreamView stream) {
  launch("widening gradients of f16", widen_scaled, blocks_for(count), dim3(kBlock), stream, from, largest, log2_ranks,
         to, static_cast<std::int64_t>(count));
}

}  // namespace lockstep::ddp
