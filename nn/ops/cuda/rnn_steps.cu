#include "nn/ops/cuda/own_kernels.h"

#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kStepBlocks = 4096;
constexpr int kStepRows = 4;  // that a thread moves at least

// Nothing: `steps`.
__device__ std::int64_t length_of(const std::int32_t* lengths, std::int64_t b, std::int64_t steps) {
  if (lengths == nullptr) return steps;
  const std::int64_t length = lengths[b];
  return length < 0 ? 0 : at_most(length, steps);
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    move_steps(ColumnPlan plan, std::int64_t steps, const std::int32_t* lengths, bool reverse, const T* x, T* y) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  for (std::int64_t row = at.row; row < at.end; row += plan.lines) {
    const std::int64_t b = row / steps, t = row % steps, length = length_of(lengths, b, steps);
    Pack<T, kWidth> pack;
    for (int k = 0; k < kWidth; ++k) pack.of[k] = from_float<T>(0.0f);
    if (t < length) {
      const std::int64_t from = b * steps + (reverse ? length - 1 - t : t);
      pack = load_pack<kWidth>(x + (from * plan.packs + at.pack) * kWidth);
    }
    store_pack(y + (row * plan.packs + at.pack) * kWidth, pack);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) move_last(std::int64_t count, std::int64_t width, std::int64_t steps,
                                                    const std::int32_t* lengths, const T* x, const T* first, T* h) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= count) return;
  const std::int64_t b = i / width, length = length_of(lengths, b, steps);
  if (length > 0)
    h[i] = x[(b * steps + length - 1) * width + i % width];
  else
    h[i] = first != nullptr ? first[i] : from_float<T>(0.0f);
}

const std::int32_t* numbers_of(const Tensor& lengths) {
  return lengths.defined() ? lengths.data<std::int32_t>() : nullptr;
}

}  // namespace

void take_steps(Context& context, const Tensor& x, const Tensor& lengths, bool reverse, const Tensor& y) {
  LOCKSTEP_ASSERT(x.shape() == y.shape() && x.dtype() == y.dtype(), "{} and {}", to_string(x.shape()),
                  to_string(y.shape()));
  if (x.count() == 0) return;
  const std::int64_t width = x.size(2);
  with_float_type(x.dtype(), [&]<class T>(T) {
    constexpr int kWide = kVector<T>;
    const bool wide = width % kWide == 0 && fits_packs(x.data<T>(), kWide) && fits_packs(y.data<T>(), kWide);
    with_width<kWide>(wide, [&](auto packed) {
      constexpr int kWidth = decltype(packed)::value;
      const ColumnPlan plan = plan_columns(x.size(0) * x.size(1), width / kWidth, kStepBlocks, kStepRows);
      LOCKSTEP_ASSERT(plan.tiles <= kMostBlocks, "steps of {} packs", plan.packs);
      launch("ordering steps", move_steps<kWidth, T>,
             dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks)), dim3(kBlock), context.stream,
             plan, x.size(1), numbers_of(lengths), reverse, x.data<T>(), y.data<T>());
    });
  });
}

void take_last_steps(Context& context, const Tensor& steps, const Tensor& lengths, const Tensor& first,
                     const Tensor& h) {
  LOCKSTEP_ASSERT(steps.dtype() == h.dtype() && h.count() == steps.size(0) * steps.size(2), "{} and {}",
                  to_string(steps.shape()), to_string(h.shape()));
  const std::int64_t blocks = ceil_div(h.count(), kBlock);
  LOCKSTEP_ASSERT(blocks <= kMostBlocks, "{} states", h.count());
  with_float_type(h.dtype(), [&]<class T>(T) {
    launch("taking last steps", move_last<T>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context.stream,
           h.count(), steps.size(2), steps.size(1), numbers_of(lengths), steps.data<T>(),
           first.defined() ? first.data<T>() : nullptr, h.data<T>());
  });
}

}  // namespace lockstep::nn::cuda
