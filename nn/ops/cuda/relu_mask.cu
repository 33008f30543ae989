#include "nn/ops/cuda/product.h"
#include "nn/ops/cuda/relu_mask.h"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// A byte of mask for each thread.
template <class T>
__global__ void __launch_bounds__(kBlock)
    write_bits(std::int64_t bytes, std::int64_t row_bytes, std::int64_t columns, const T* y, std::uint8_t* mask) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < bytes; i += step) {
    const std::int64_t row = i / row_bytes, first = i % row_bytes * 8;
    unsigned bits = 0;
    for (int k = 0; k < 8; ++k)
      if (first + k < columns && to_float(y[row * columns + first + k]) > 0.0f) bits |= 1u << k;
    mask[i] = static_cast<std::uint8_t>(bits);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    clear_unset(std::int64_t count, std::int64_t row_bytes, std::int64_t columns, const std::uint8_t* mask, T* dx) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += step) {
    const std::int64_t column = i % columns;
    if ((mask[i / columns * row_bytes + column / 8] >> (column % 8) & 1) == 0) dx[i] = from_float<T>(0.0f);
  }
}

dim3 blocks_for(std::int64_t threads) {
  return dim3(static_cast<unsigned>(at_most(ceil_div(threads, kBlock), kMostBlocks)));
}

}  // namespace

void write_mask(Context& context, const Tensor& y, const Tensor& mask) {
  const std::int64_t columns = y.size(1), row_bytes = mask_pitch_of(columns) / 8, bytes = y.size(0) * row_bytes;
  LOCKSTEP_ASSERT(mask.count() == bytes, "a mask of {} for {}", to_string(mask.shape()), to_string(y.shape()));
  with_float_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    launch("a ReLU's mask", write_bits<T>, blocks_for(bytes), dim3(kBlock), context.stream, bytes, row_bytes, columns,
           y.data<T>(), mask.data<std::uint8_t>());
  });
}

void apply_mask(Context& context, const Tensor& mask, const Tensor& dx) {
  const std::int64_t columns = dx.size(1), row_bytes = mask_pitch_of(columns) / 8;
  LOCKSTEP_ASSERT(mask.count() == dx.size(0) * row_bytes, "a mask of {} for {}", to_string(mask.shape()),
                  to_string(dx.shape()));
  with_float_type(dx.dtype(), [&](auto type) {
    using T = decltype(type);
    launch("applying a ReLU's mask", clear_unset<T>, blocks_for(dx.count()), dim3(kBlock), context.stream, dx.count(),
           row_bytes, columns, mask.data<std::uint8_t>(), dx.data<T>());
  });
}

}  // namespace lockstep::nn::cuda
