#include "nn/ops/cuda/bias.h"

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// Enough blocks to keep a large GPU busy, and rows enough for each thread that putting partial sums together is cheap.
constexpr std::int64_t kSumBlocks = 1024;
constexpr int kRowsPerThread = 8;

// sums[j][c]: over the rows of chunk j of x (rows, packs · kWidth), which are `pitch` elements apart.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock)
    sum_chunks(ColumnPlan plan, const T* x, std::int64_t pitch, bool accumulate, float* sums) {
  __shared__ float held[kBlock * kWidth];
  const int lane = static_cast<int>(threadIdx.x) % plan.tile, line = static_cast<int>(threadIdx.x) / plan.tile;
  const std::int64_t pack = std::int64_t{blockIdx.x} * plan.tile + lane;
  const std::int64_t begin = std::int64_t{blockIdx.y} * plan.chunk;
  const std::int64_t end = at_most(begin + plan.chunk, plan.rows);
  const bool used = pack < plan.packs;

  float sum[kWidth] = {};
  if (used)
    for (std::int64_t row = begin + line; row < end; row += plan.lines) {
      const Pack<T, kWidth> values = load_pack<kWidth>(x + row * pitch + pack * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(values.of[k]);
    }
  float* const own = held + static_cast<int>(threadIdx.x) * kWidth;
  for (int k = 0; k < kWidth; ++k) own[k] = sum[k];
  for (int half = plan.lines / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line < half)
      for (int k = 0; k < kWidth; ++k) own[k] += own[half * plan.tile * kWidth + k];
  }
  if (!used || line > 0) return;
  float* const to = sums + (std::int64_t{blockIdx.y} * plan.packs + pack) * kWidth;
  for (int k = 0; k < kWidth; ++k) to[k] = accumulate ? to[k] + own[k] : own[k];
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
      ColumnPlan plan = plan_columns(rows, columns / kWidth, kSumBlocks, kRowsPerThread);
      plan.chunks = at_least(plan.chunks, 1);  // no rows: sums of nothing
      if (plan.chunks == 1) return start_sums<kWidth>(context, plan, from, pitch, accumulate, sums.f32());
      const Tensor parts = Tensor::empty(context.allocator, {plan.chunks, columns});
      start_sums<kWidth>(context, plan, from, pitch, false, parts.f32());
      const ColumnPlan last = plan_columns(plan.chunks, columns, 1, 1, kJoinColumns);
      LOCKSTEP_ASSERT(last.chunks == 1, "{} parts of sums", plan.chunks);
      start_sums<1>(context, last, parts.f32(), columns, accumulate, sums.f32());
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
