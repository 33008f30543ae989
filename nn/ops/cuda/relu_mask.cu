#include "base/error.h"
#include "nn/ops/cuda/own_kernels.h"
#include "nn/ops/cuda/product.h"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kBits = 8;  // of a thread: a byte of the mask, and the elements that belong to it

// Which byte of a mask is a thread's: of which row, and for which columns from `first` on.
struct BytePlace {
  std::int64_t row, first;
};
__device__ BytePlace byte_place(std::int64_t byte, std::int64_t row_bytes) {
  const std::int64_t row = byte / row_bytes;
  return {row, (byte - row * row_bytes) * kBits};
}

// Rows are packs of kWidth, or kWidth is 1.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    relu_rows(std::int64_t bytes, std::int64_t row_bytes, std::int64_t columns, T* y, std::uint8_t* mask) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < bytes; i += step) {
    const BytePlace at = byte_place(i, row_bytes);
    T* const own = y + at.row * columns + at.first;
    Pack<T, kWidth> packs[kBits / kWidth] = {};
    for (int k = 0; k < kBits; k += kWidth)
      if (at.first + k < columns) packs[k / kWidth] = load_pack<kWidth>(own + k);
    unsigned bits = 0;
    for (int k = 0; k < kBits; ++k) {
      T& value = packs[k / kWidth].of[k % kWidth];
      if (to_float(value) > 0.0f) bits |= 1u << k;
      if (to_float(value) < 0.0f) value = from_float<T>(0.0f);  // this way round NaN passes
    }
    for (int k = 0; k < kBits; k += kWidth)
      if (at.first + k < columns) store_pack(own + k, packs[k / kWidth]);
    mask[i] = static_cast<std::uint8_t>(bits);
  }
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    clear_unset(std::int64_t bytes, std::int64_t row_bytes, std::int64_t columns, const std::uint8_t* mask, T* dx) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < bytes; i += step) {
    const BytePlace at = byte_place(i, row_bytes);
    if (at.first >= columns) continue;
    const unsigned bits = mask[i];
    T* const own = dx + at.row * columns + at.first;
    Pack<T, kWidth> packs[kBits / kWidth] = {};
    for (int k = 0; k < kBits; k += kWidth)
      if (at.first + k < columns) packs[k / kWidth] = load_pack<kWidth>(own + k);
    for (int k = 0; k < kBits; ++k)
      if ((bits >> k & 1) == 0) packs[k / kWidth].of[k % kWidth] = from_float<T>(0.0f);
    for (int k = 0; k < kBits; k += kWidth)
      if (at.first + k < columns) store_pack(own + k, packs[k / kWidth]);
  }
}

// Calls start(width, bytes of the mask, of a row, columns, grid) for what `activation` (N, C) allows.
template <class T, class F>
void for_mask(const Tensor& activation, const Tensor& mask, F&& start) {
  const std::int64_t columns = activation.size(1), row_bytes = mask_pitch_of(columns) / kBits;
  const std::int64_t bytes = activation.size(0) * row_bytes;
  LOCKSTEP_ASSERT(mask.count() == bytes, "a mask of {} for {}", to_string(mask.shape()), to_string(activation.shape()));
  const dim3 grid(static_cast<unsigned>(at_most(ceil_div(bytes, kBlock), kMostBlocks)));
  constexpr int kWide = kVector<T>;
  static_assert(kBits % kWide == 0);
  with_width<kWide>(columns % kWide == 0 && fits_packs(activation.data<T>(), kWide),
                    [&](auto width) { start(width, bytes, row_bytes, columns, grid); });
}

}  // namespace

void relu_with_mask(Context& context, const Tensor& y, const Tensor& mask) {
  with_float_type(y.dtype(), [&]<class T>(T) {
    for_mask<T>(y, mask,
                [&](auto width, std::int64_t bytes, std::int64_t row_bytes, std::int64_t columns, const dim3& grid) {
                  launch("ReLU with its mask", relu_rows<decltype(width)::value, T>, grid, dim3(kBlock), context.stream,
                         bytes, row_bytes, columns, y.data<T>(), mask.data<std::uint8_t>());
                });
  });
}

void apply_mask(Context& context, const Tensor& mask, const Tensor& dx) {
  with_float_type(dx.dtype(), [&]<class T>(T) {
    for_mask<T>(dx, mask,
                [&](auto width, std::int64_t bytes, std::int64_t row_bytes, std::int64_t columns, const dim3& grid) {
                  launch("applying a ReLU's mask", clear_unset<decltype(width)::value, T>, grid, dim3(kBlock),
                         context.stream, bytes, row_bytes, columns, mask.data<std::uint8_t>(), dx.data<T>());
                });
  });
}

}  // namespace lockstep::nn::cuda
