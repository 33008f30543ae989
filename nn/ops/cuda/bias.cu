#include "nn/ops/cuda/own_kernels.h"

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// See Note [Two stages]. With at most 64 registers a multiprocessor has four blocks: 128 bytes are on their way to each
// of 1,024 threads.
constexpr int kSumRows = 8;  // of a thread at once

// sums (chunks, C): over the rows of each chunk of x (rows, packs · kWidth), which are `pitch` elements apart.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock, 4)
    sum_chunks(ColumnPlan plan, const T* x, std::int64_t pitch, bool accumulate, float* sums) {
  const Place at = place_in(plan);
  float mine[1][kWidth] = {};
  if (at.pack < plan.packs) {
    const T* const own = x + at.pack * kWidth;
    for_rows<kSumRows>(plan, at, [&](auto n, std::int64_t row) {
      constexpr int kRows = decltype(n)::value;
      Pack<T, kWidth> values[kRows];
      for (int i = 0; i < kRows; ++i) values[i] = load_pack<kWidth>(own + (row + i * plan.lines) * pitch);
      for (int i = 0; i < kRows; ++i)
        for (int k = 0; k < kWidth; ++k) mine[0][k] += to_float(values[i].of[k]);
    });
  }
  leave_sums(plan, mine, [&](std::int64_t column, const float(&made)[1]) {
    float* const to = sums + blockIdx.y * plan.packs * kWidth + column;
    *to = accumulate ? *to + made[0] : made[0];
  });
}

__global__ void __launch_bounds__(kJoinBlock)
    join_sums_of_chunks(std::int64_t chunks, std::int64_t columns, const float* parts, bool accumulate, float* sums) {
  const JoinPlace at = join_place();
  const Numbers<1> made = join_sums<1>(chunks, columns, parts);
  if (at.line > 0 || at.column >= columns) return;
  sums[at.column] = accumulate ? sums[at.column] + made.of[0] : made.of[0];
}

template <int kWidth, class T>
void start_sums(Context& context, const ColumnPlan& plan, const T* x, std::int64_t pitch, bool accumulate,
                float* sums) {
  launch("column sums", sum_chunks<kWidth, T>,
         dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks)), dim3(kBlock), context.stream,
         plan, x, pitch, accumulate, sums);
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    add_rows(std::int64_t count, std::int64_t packs, const T* b, std::int64_t pitch, T* y) {
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += step) {
    const Pack<T, kWidth> added = load_pack<kWidth>(b + i % packs * kWidth);
    T* const at = y + i / packs * pitch + i % packs * kWidth;
    Pack<T, kWidth> values = load_pack<kWidth>(at);
    for (int k = 0; k < kWidth; ++k) values.of[k] = from_float<T>(to_float(values.of[k]) + to_float(added.of[k]));
    store_pack(at, values);
  }
}

}  // namespace

void sum_columns(Context& context, const Tensor& x, bool accumulate, const Tensor& sums) {
  const std::int64_t columns = sums.count();
  LOCKSTEP_ASSERT(columns > 0 && x.count() % columns == 0, "{} sums of {}", columns, to_string(x.shape()));
  const std::int64_t rows = x.count() / columns;
  with_float_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = kVector<T>;
    const T* const from = x.rows<T>();
    const std::int64_t pitch = x.is_contiguous() ? columns : x.pitch();
    with_width<kWide>(columns % kWide == 0 && pitch % kWide == 0 && fits_packs(from, kWide), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      ColumnPlan plan = plan_columns(rows, columns / kWidth, kPartBlocks, kSumRows);
      plan.chunks = at_least(plan.chunks, 1);  // no rows: sums of nothing
      if (plan.chunks == 1) return start_sums<kWidth>(context, plan, from, pitch, accumulate, sums.f32());
      const Tensor parts = Tensor::empty(context.allocator, {plan.chunks, columns});
      start_sums<kWidth>(context, plan, from, pitch, false, parts.f32());
      launch("column sums", join_sums_of_chunks, dim3(static_cast<unsigned>(ceil_div(columns, kJoinColumns))),
             dim3(kJoinBlock), context.stream, plan.chunks, columns, parts.f32(), accumulate, sums.f32());
    });
  });
}

void add_to_rows(Context& context, const Tensor& b, const Tensor& y) {
  const std::int64_t columns = b.count();
  LOCKSTEP_ASSERT(columns > 0 && y.count() % columns == 0 && b.dtype() == y.dtype(), "{} added to {}",
                  to_string(b.shape()), to_string(y.shape()));
  with_float_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = kVector<T>;
    T* const to = y.rows<T>();
    const std::int64_t pitch = y.is_contiguous() ? columns : y.pitch();
    const bool wide =
        columns % kWide == 0 && pitch % kWide == 0 && fits_packs(b.data<T>(), kWide) && fits_packs(to, kWide);
    with_width<kWide>(wide, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const std::int64_t count = y.count() / kWidth;
      launch("adding a bias", add_rows<kWidth, T>,
             dim3(static_cast<unsigned>(at_most(ceil_div(count, kBlock), kMostBlocks))), dim3(kBlock), context.stream,
             count, columns / kWidth, b.data<T>(), pitch, to);
    });
  });
}

}  // namespace lockstep::nn::cuda
