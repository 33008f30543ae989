#include "lockstep/nn/ops/norm.h"

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/cuda/work.h"

namespace lockstep::nn::cuda {
namespace {

// Note [Two stages]
// A column's mean and variance, and the sums of backward, are made in two stages: each block of the first has some
// columns and a chunk of the rows and leaves its part in `parts`; the second goes over the chunks. How rows are cut
// depends on the shape alone, and everything is added in a fixed order: the same input gives the same bits.

constexpr int kSpreadBlocks = 4096;  // of what goes over all elements and leaves nothing to add up
constexpr int kMomentRows = 4;       // that a thread reads at once
// A thread has the columns of one access, kVector<T>, so 32 bytes of each tensor that a pass reads are on their way to
// it. By Little's law an H100 wants 18 KB on their way to each multiprocessor (3.35 TB/s · 0.7 µs / 132); the registers
// that nvcc takes, 102 at the most, allow enough threads to have 24 KB or more. No GPU has measured it.
constexpr int kNormRows = 2;

// What is known of some numbers. `squares` is the sum of their squared distances from their mean.
struct Moments {
  float count, mean, squares;
};
// Chan, Golub and LeVeque: no large numbers are subtracted from each other, whatever the mean is.
__device__ Moments joined(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float apart = b.mean - a.mean;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * (a.count * share)};
}

// parts (chunks, 2, C): mean and squares of each chunk.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) moments_of_chunks(ColumnPlan plan, const T* x, float* parts) {
  __shared__ float means[kWidth][kBlock], squares[kWidth][kBlock], counts[kBlock];
  const Place at = place_in(plan);
  const std::int64_t columns = plan.packs * kWidth;
  Moments mine[kWidth] = {};
  if (at.pack < plan.packs) {
    for (std::int64_t row = at.row; row < at.end; row += kMomentRows * plan.lines) {
      Pack<T, kWidth> values[kMomentRows];
      bool there[kMomentRows];
      float count = 0.0f;
      for (int i = 0; i < kMomentRows; ++i) {
        there[i] = row + i * plan.lines < at.end;
        count += there[i] ? 1.0f : 0.0f;
        values[i] = Pack<T, kWidth>{};
        if (there[i]) values[i] = load_pack<kWidth>(x + (row + i * plan.lines) * columns + at.pack * kWidth);
      }
      const float one_of = 1.0f / count, share = count / (mine[0].count + count);
      const float weight = mine[0].count * share;
      for (int k = 0; k < kWidth; ++k) {
        float sum = 0.0f, from_mean = 0.0f;
        for (int i = 0; i < kMomentRows; ++i) sum += to_float(values[i].of[k]);
        const float mean = sum * one_of;
        for (int i = 0; i < kMomentRows; ++i) {
          const float apart = there[i] ? to_float(values[i].of[k]) - mean : 0.0f;
          from_mean += apart * apart;
        }
        const float apart = mean - mine[k].mean;  // joined(), with what all columns share taken out
        mine[k].mean += apart * share;
        mine[k].squares += from_mean + apart * apart * weight;
        mine[k].count += count;
      }
    }
  }
  const int t = static_cast<int>(threadIdx.x);
  const auto leave = [&] {
    counts[t] = mine[0].count;
    for (int k = 0; k < kWidth; ++k) {
      means[k][t] = mine[k].mean;
      squares[k][t] = mine[k].squares;
    }
  };
  leave();
  for (int step = plan.lines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (at.line < step) {
      const int other = t + step * plan.tile;
      for (int k = 0; k < kWidth; ++k) mine[k] = joined(mine[k], {counts[other], means[k][other], squares[k][other]});
      leave();
    }
  }
  if (at.line > 0 || at.pack >= plan.packs) return;
  float* const to = parts + blockIdx.y * 2 * columns + at.pack * kWidth;
  for (int k = 0; k < kWidth; ++k) {
    to[k] = mine[k].mean;
    to[columns + k] = mine[k].squares;
  }
}

// Running statistics, and by how much they move; nullptr: there are none.
struct RunningColumns {
  float keep = 1.0f, momentum = 0.0f, unbias = 1.0f;
  float* mean = nullptr;
  float* variance = nullptr;

  __device__ void move(std::int64_t column, float to_mean, float to_variance) const {
    mean[column] = keep * mean[column] + momentum * to_mean;
    variance[column] = keep * variance[column] + momentum * unbias * to_variance;
  }
};

// A block has kJoinColumns columns, and kBlock / kJoinColumns threads for the chunks of each. `spread` becomes the sum
// of squares over `divisor`; where `rows` is not nullptr, it becomes their number.
__global__ void __launch_bounds__(kBlock)
    join_chunks(ColumnPlan plan, std::int64_t columns, const float* parts, float divisor, float* mean, float* spread,
                float* rows, RunningColumns running) {
  constexpr int kLines = kBlock / kJoinColumns;
  __shared__ Moments held[kBlock];
  const int t = static_cast<int>(threadIdx.x), line = t / kJoinColumns;
  const std::int64_t column = std::int64_t{blockIdx.x} * kJoinColumns + t % kJoinColumns;
  Moments mine = {};
  if (column < columns) {
    for (std::int64_t chunk = line; chunk < plan.chunks; chunk += kLines) {
      const float* const from = parts + chunk * 2 * columns + column;
      const auto count = static_cast<float>(at_most(plan.rows - chunk * plan.chunk, plan.chunk));
      mine = joined(mine, {count, from[0], from[columns]});
    }
  }
  held[t] = mine;
  for (int step = kLines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (line < step) {
      mine = joined(mine, held[t + step * kJoinColumns]);
      held[t] = mine;
    }
  }
  if (line > 0 || column >= columns) return;
  mean[column] = mine.mean;
  const float shared_out = mine.squares / divisor;
  spread[column] = shared_out;
  if (running.mean != nullptr) running.move(column, mine.mean, shared_out);
  if (rows != nullptr && column == 0) *rows = static_cast<float>(plan.rows);
}

// parts (ranks, stride): means, sums of squares and a number of rows each. A thread a column.
__global__ void __launch_bounds__(kBlock)
    join_ranks(std::int64_t columns, int ranks, std::int64_t stride, const float* parts, float keep, float momentum,
               float* mean, float* variance, float* rows, float* running_mean, float* running_variance) {
  const std::int64_t c = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (c >= columns) return;
  Moments all = {};
  for (int r = 0; r < ranks; ++r) {
    const float* const part = parts + r * stride;
    all = joined(all, {part[2 * columns], part[c], part[columns + c]});
  }
  if (c == 0) *rows = all.count;
  mean[c] = all.mean;
  variance[c] = all.count > 0.0f ? all.squares / all.count : 0.0f;
  if (!(all.count > 0.0f)) return;
  const float unbias = all.count > 1.0f ? all.count / (all.count - 1.0f) : 1.0f;
  running_mean[c] = keep * running_mean[c] + momentum * all.mean;
  running_variance[c] = keep * running_variance[c] + momentum * unbias * variance[c];
}

// What is known of a thread's columns: y = (x − middle) · scale + shift.
template <int kWidth>
struct Normalisation {
  float scale[kWidth], shift[kWidth], middle[kWidth];

  __device__ Normalisation(std::int64_t column, const float* gamma, const float* beta, const float* mean,
                           const float* variance, float eps) {
    for (int k = 0; k < kWidth; ++k) {
      scale[k] = gamma[column + k] / sqrtf(variance[column + k] + eps);
      shift[k] = beta[column + k];
      middle[k] = mean[column + k];
    }
  }
  // Rounded in the same way wherever it is used: backward finds out from it which y were above 0.
  __device__ float of(int k, float x) const { return __fmaf_rn(x - middle[k], scale[k], shift[k]); }
};

// Whether what is stored is.
template <class T>
__device__ bool is_above_0(float value) {
  return to_float(from_float<T>(value)) > 0.0f;
}

// How backward knows where y, to which a ReLU was applied, is above 0.
enum class MaskOf {
  kNone,     // there was no ReLU
  kResult,   // from y
  kNumbers,  // from x, of which y is computed again: that reads nothing more, where nothing was added to it
};

// y = (x − mean) / sqrt(variance + eps) · gamma + beta; with kRelu, max(y + residual, 0), where residual may be
// nullptr.
template <int kWidth, bool kRelu, class T>
__global__ void __launch_bounds__(kBlock)
    normalise(ColumnPlan plan, const T* x, const float* gamma, const float* beta, const float* mean,
              const float* variance, float eps, const T* residual, T* y) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  const Normalisation<kWidth> made_of(column, gamma, beta, mean, variance, eps);
  for (std::int64_t row = at.row; row < at.end; row += kNormRows * plan.lines) {
    Pack<T, kWidth> values[kNormRows] = {}, added[kNormRows] = {};
    for (int i = 0; i < kNormRows; ++i) {
      if (row + i * plan.lines >= at.end) continue;
      values[i] = load_pack<kWidth>(x + (row + i * plan.lines) * columns + column);
      if (kRelu && residual != nullptr)
        added[i] = load_pack<kWidth>(residual + (row + i * plan.lines) * columns + column);
    }
    for (int i = 0; i < kNormRows; ++i) {
      if (row + i * plan.lines >= at.end) continue;
      Pack<T, kWidth> made;
      for (int k = 0; k < kWidth; ++k) {
        float value = made_of.of(k, to_float(values[i].of[k]));
        if constexpr (kRelu) {
          value += to_float(added[i].of[k]);
          value = value < 0.0f ? 0.0f : value;  // this way round NaN passes
        }
        made.of[k] = from_float<T>(value);
      }
      store_pack(y + (row + i * plan.lines) * columns + column, made);
    }
  }
}

// parts (chunks, 2, C): Σ dy · (x − mean) and Σ dy of each chunk, of those dy whose y is above 0. With kResult the
// others are set to 0.
template <int kWidth, MaskOf kMask, class T>
__global__ void __launch_bounds__(kBlock)
    sums_of_chunks(ColumnPlan plan, const T* x, const T* y, T* dy, const float* gamma, const float* beta,
                   const float* mean, const float* variance, float eps, float* parts) {
  const Place at = place_in(plan);
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  float product[kWidth] = {}, sum[kWidth] = {};
  if (at.pack < plan.packs) {
    float middle[kWidth];
    for (int k = 0; k < kWidth; ++k) middle[k] = mean[column + k];
    [[maybe_unused]] const auto made_of = [&] {
      if constexpr (kMask == MaskOf::kNumbers)
        return Normalisation<kWidth>(column, gamma, beta, mean, variance, eps);
      else
        return 0;
    }();
    for (std::int64_t row = at.row; row < at.end; row += kNormRows * plan.lines) {
      Pack<T, kWidth> values[kNormRows] = {}, gradients[kNormRows] = {};
      for (int i = 0; i < kNormRows; ++i) {
        if (row + i * plan.lines >= at.end) continue;
        values[i] = load_pack<kWidth>(x + (row + i * plan.lines) * columns + column);
        gradients[i] = load_pack<kWidth>(dy + (row + i * plan.lines) * columns + column);
        if constexpr (kMask == MaskOf::kResult) {
          const auto results = load_pack<kWidth>(y + (row + i * plan.lines) * columns + column);
          for (int k = 0; k < kWidth; ++k)
            if (!(to_float(results.of[k]) > 0.0f)) gradients[i].of[k] = from_float<T>(0.0f);
          store_pack(dy + (row + i * plan.lines) * columns + column, gradients[i]);
        }
      }
      for (int i = 0; i < kNormRows; ++i) {
        if (row + i * plan.lines >= at.end) continue;
        for (int k = 0; k < kWidth; ++k) {
          const float value = to_float(values[i].of[k]);
          float gradient = to_float(gradients[i].of[k]);
          if constexpr (kMask == MaskOf::kNumbers)
            if (!is_above_0<T>(made_of.of(k, value))) gradient = 0.0f;
          product[k] += gradient * (value - middle[k]);
          sum[k] += gradient;
        }
      }
    }
  }
  leave_sums(plan, at, product, sum, parts);
}

// dgamma = Σ dy · (x − mean) / sqrt(variance + eps), dbeta = Σ dy.
__global__ void __launch_bounds__(kBlock)
    batch_norm_gradients(ColumnPlan plan, std::int64_t columns, const float* parts, const float* variance, float eps,
                         float* dgamma, float* dbeta) {
  const ColumnSums of = join_sums(plan.chunks, columns, parts);
  if (!of.known) return;
  dgamma[of.column] = of.first / sqrtf(variance[of.column] + eps);
  dbeta[of.column] = of.second;
}

// With s = sqrt(variance + eps): dx = gamma / s · (dy − dbeta / M − (x − mean) / s · dgamma / M), or gamma / s · dy
// where the statistics were given and so do not depend on x. M is *all_rows, where other ranks have some of them. With
// kMasked those dy whose y, computed again, is not above 0 count as 0.
template <int kWidth, bool kMasked, class T>
__global__ void __launch_bounds__(kBlock)
    spread_back(ColumnPlan plan, const T* x, const T* dy, const float* gamma, const float* beta, const float* mean,
                const float* variance, const float* dgamma, const float* dbeta, const float* all_rows, float eps,
                bool given_statistics, T* dx) {
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  const float one_of_rows = 1.0f / (all_rows != nullptr ? *all_rows : static_cast<float>(plan.rows));
  float scale[kWidth], middle[kWidth], offset[kWidth], slope[kWidth];
  for (int k = 0; k < kWidth; ++k) {
    const float one_of_deviation = 1.0f / sqrtf(variance[column + k] + eps);
    scale[k] = gamma[column + k] * one_of_deviation;
    middle[k] = mean[column + k];
    offset[k] = dbeta[column + k] * one_of_rows;
    slope[k] = dgamma[column + k] * one_of_rows * one_of_deviation;
  }
  [[maybe_unused]] const auto made_of = [&] {
    if constexpr (kMasked)
      return Normalisation<kWidth>(column, gamma, beta, mean, variance, eps);
    else
      return 0;
  }();
  for (std::int64_t row = at.row; row < at.end; row += kNormRows * plan.lines) {
    Pack<T, kWidth> values[kNormRows] = {}, gradients[kNormRows] = {};
    for (int i = 0; i < kNormRows; ++i) {
      if (row + i * plan.lines >= at.end) continue;
      if (!given_statistics) values[i] = load_pack<kWidth>(x + (row + i * plan.lines) * columns + column);
      gradients[i] = load_pack<kWidth>(dy + (row + i * plan.lines) * columns + column);
    }
    for (int i = 0; i < kNormRows; ++i) {
      if (row + i * plan.lines >= at.end) continue;
      Pack<T, kWidth> made;
      for (int k = 0; k < kWidth; ++k) {
        float gradient = to_float(gradients[i].of[k]);
        if constexpr (kMasked)
          if (!is_above_0<T>(made_of.of(k, to_float(values[i].of[k])))) gradient = 0.0f;
        if (!given_statistics) gradient -= offset[k] + (to_float(values[i].of[k]) - middle[k]) * slope[k];
        made.of[k] = from_float<T>(scale[k] * gradient);
      }
      store_pack(dx + (row + i * plan.lines) * columns + column, made);
    }
  }
}

__global__ void __launch_bounds__(kBlock)
    move_running(std::int64_t columns, const float* mean, const float* variance, RunningColumns running) {
  const std::int64_t c = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (c < columns) running.move(c, mean[c], variance[c]);
}

class CudaNorm final : public NormKernels {
 public:
  explicit CudaNorm(Context& context) : context_(context) {}

  void forward_train(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                     const Tensor& mean, const Tensor& variance) override {
    const Work work(context_, "batch normalisation", {&x, &gamma, &beta, &y, &mean, &variance});
    take_moments(x, mean, variance, {});
    forward_infer(x, gamma, beta, mean, variance, eps, y);
  }

  void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& residual,
                          const Tensor& y, const Tensor& mean, const Tensor& variance) override {
    const Work work(context_, "batch normalisation with ReLU", {&x, &gamma, &beta, &residual, &y, &mean, &variance});
    take_moments(x, mean, variance, {});
    apply<true>(x, gamma, beta, mean, variance, eps, residual, y);
  }

  void forward_train_moving(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, bool relu,
                            const Tensor& residual, const Running& running, const Tensor& y, const Tensor& mean,
                            const Tensor& variance) override {
    const Work work(context_, relu ? "batch normalisation with ReLU" : "batch normalisation",
                    {&x, &gamma, &beta, &residual, &y, &mean, &variance, &running.mean, &running.variance});
    if (mean.count() == 0) return;
    take_moments(x, mean, variance,
                 running_of(x.count() / mean.count(), running.momentum, running.mean, running.variance));
    if (relu)
      apply<true>(x, gamma, beta, mean, variance, eps, residual, y);
    else
      apply<false>(x, gamma, beta, mean, variance, eps, Tensor(), y);
  }

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    const Work work(context_, "batch normalisation", {&x, &gamma, &beta, &mean, &variance, &y});
    apply<false>(x, gamma, beta, mean, variance, eps, Tensor(), y);
  }

  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                const Tensor& dbeta) override {
    const Work work(context_, "batch normalisation's backward",
                    {&x, &dy, &gamma, &mean, &variance, &dx, &dgamma, &dbeta});
    differentiate<MaskOf::kNone>(x, x, dy, gamma, gamma, mean, variance, given_statistics, eps, dx, dgamma, dbeta);
  }

  void backward_relu(const Tensor& x, const Tensor& y, bool residual, const Tensor& dy, const Tensor& gamma,
                     const Tensor& beta, const Tensor& mean, const Tensor& variance, double eps, const Tensor& dx,
                     const Tensor& dgamma, const Tensor& dbeta) override {
    const Work work(context_, "batch normalisation's backward with ReLU",
                    {&x, &y, &dy, &gamma, &beta, &mean, &variance, &dx, &dgamma, &dbeta});
    if (residual)
      differentiate<MaskOf::kResult>(x, y, dy, gamma, beta, mean, variance, false, eps, dx, dgamma, dbeta);
    else
      differentiate<MaskOf::kNumbers>(x, x, dy, gamma, beta, mean, variance, false, eps, dx, dgamma, dbeta);
  }

  void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                      const Tensor& running_mean, const Tensor& running_variance) override {
    const Work work(context_, "running statistics", {&mean, &variance, &running_mean, &running_variance});
    const std::int64_t columns = mean.count();
    launch("running statistics", move_running, dim3(static_cast<unsigned>(ceil_div(columns, kBlock))), dim3(kBlock),
           context_.stream, columns, mean.f32(), variance.f32(),
           running_of(rows, momentum, running_mean, running_variance));
  }

  void moments(const Tensor& x, const Tensor& part) override {
    const Work work(context_, "batch statistics", {&x, &part});
    const std::int64_t columns = part.count() / 2;
    find_moments(x, columns, 1.0f, part.f32(), part.f32() + columns, part.f32() + 2 * columns, {});
  }

  void join_moments(const Tensor& parts, double momentum, const Tensor& mean, const Tensor& variance,
                    const Tensor& rows, const Tensor& running_mean, const Tensor& running_variance) override {
    const Work work(context_, "batch statistics", {&parts, &mean, &variance, &rows, &running_mean, &running_variance});
    const std::int64_t columns = mean.count();
    launch("batch statistics", join_ranks, dim3(static_cast<unsigned>(ceil_div(columns, kBlock))), dim3(kBlock),
           context_.stream, columns, static_cast<int>(parts.size(0)), parts.size(1), parts.f32(), 1.0 - momentum,
           momentum, mean.f32(), variance.f32(), rows.f32(), running_mean.f32(), running_variance.f32());
  }

  void backward_sums(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& sums) override {
    const Work work(context_, "batch normalisation's backward", {&x, &dy, &mean, &variance, &sums});
    add_up<MaskOf::kNone>(x, x, dy, mean, mean, mean, variance, eps, sums.f32(), sums.f32() + mean.count());
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                      const Tensor& variance, const Tensor& rows, const Tensor& sums, double eps,
                      const Tensor& dx) override {
    const Work work(context_, "batch normalisation's backward", {&x, &dy, &gamma, &mean, &variance, &rows, &sums, &dx});
    if (x.count() == 0) return;
    spread_back_to<false>(x, dy, gamma, gamma, mean, variance, sums.f32(), sums.f32() + mean.count(), rows.f32(), eps,
                          false, dx);
  }

 private:
  static RunningColumns running_of(std::int64_t rows, double momentum, const Tensor& mean, const Tensor& variance) {
    const double unbias = rows > 1 ? static_cast<double>(rows) / static_cast<double>(rows - 1) : 1.0;
    return {.keep = static_cast<float>(1.0 - momentum),
            .momentum = static_cast<float>(momentum),
            .unbias = static_cast<float>(unbias),
            .mean = mean.f32(),
            .variance = variance.f32()};
  }

  void take_moments(const Tensor& x, const Tensor& mean, const Tensor& variance, const RunningColumns& running) {
    const std::int64_t columns = mean.count();
    if (columns == 0) return;
    LOCKSTEP_ASSERT(x.count() > 0, "batch normalisation of no rows");
    find_moments(x, columns, static_cast<float>(x.count() / columns), mean.f32(), variance.f32(), nullptr, running);
  }

  // x may be without rows: zeros.
  void find_moments(const Tensor& x, std::int64_t columns, float divisor, float* mean, float* spread, float* rows,
                    const RunningColumns& running) {
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x}), [&](auto width) {
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / width, kPartBlocks, kMomentRows);
        const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
        launch("batch statistics", moments_of_chunks<decltype(width)::value, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), parts.f32());
        launch("batch statistics", join_chunks, joiners(columns), dim3(kBlock), context_.stream, plan, columns,
               parts.f32(), divisor, mean, spread, rows, running);
      });
    });
  }

  template <bool kRelu>
  void apply(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean, const Tensor& variance,
             double eps, const Tensor& residual, const Tensor& y) {
    if (x.count() == 0) return;
    const std::int64_t columns = mean.count();
    const Tensor& added = residual.defined() ? residual : x;
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &y, &added}), [&](auto width) {
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / width, kSpreadBlocks, kNormRows);
        launch("batch normalisation", normalise<decltype(width)::value, kRelu, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), gamma.f32(), beta.f32(), mean.f32(), variance.f32(), eps,
               residual.defined() ? residual.data<T>() : nullptr, y.data<T>());
      });
    });
  }

  // `beta` is read for kNumbers alone, y for kResult.
  template <MaskOf kMask>
  void differentiate(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& gamma, const Tensor& beta,
                     const Tensor& mean, const Tensor& variance, bool given_statistics, double eps, const Tensor& dx,
                     const Tensor& dgamma, const Tensor& dbeta) {
    if (mean.count() == 0) return;
    add_up<kMask>(x, y, dy, gamma, beta, mean, variance, eps, dgamma.f32(), dbeta.f32());
    spread_back_to<kMask == MaskOf::kNumbers>(x, dy, gamma, beta, mean, variance, dgamma.f32(), dbeta.f32(), nullptr,
                                              eps, given_statistics, dx);
  }

  template <MaskOf kMask>
  void add_up(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& gamma, const Tensor& beta,
              const Tensor& mean, const Tensor& variance, double eps, float* dgamma, float* dbeta) {
    const std::int64_t columns = mean.count();
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &y, &dy}), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / kWidth, kPartBlocks, kNormRows);
        const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
        launch("batch normalisation's backward", sums_of_chunks<kWidth, kMask, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), y.data<T>(), dy.data<T>(), gamma.f32(), beta.f32(), mean.f32(),
               variance.f32(), eps, parts.f32());
        // Without rows, too: zeros.
        launch("batch normalisation's backward", batch_norm_gradients, joiners(columns), dim3(kBlock), context_.stream,
               plan, columns, parts.f32(), variance.f32(), eps, dgamma, dbeta);
      });
    });
  }

  template <bool kMasked>
  void spread_back_to(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                      const Tensor& variance, const float* dgamma, const float* dbeta, const float* all_rows,
                      double eps, bool given_statistics, const Tensor& dx) {
    const std::int64_t columns = mean.count();
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &dy, &dx}), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / kWidth, kSpreadBlocks, kNormRows);
        launch("batch normalisation's backward", spread_back<kWidth, kMasked, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), dy.data<T>(), gamma.f32(), beta.f32(), mean.f32(), variance.f32(),
               dgamma, dbeta, all_rows, eps, given_statistics, dx.data<T>());
      });
    });
  }

  static dim3 grid_of(const ColumnPlan& plan) {
    LOCKSTEP_ASSERT(plan.tiles <= kMostBlocks, "batch normalisation of {} packs", plan.packs);
    return dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  }
  static dim3 joiners(std::int64_t columns) { return dim3(static_cast<unsigned>(ceil_div(columns, kJoinColumns))); }

  template <class T>
  static bool takes_packs(std::int64_t columns, std::initializer_list<const Tensor*> tensors) {
    return columns % kVector<T> == 0 &&
           std::ranges::all_of(tensors, [](const Tensor* tensor) { return fits_packs(tensor->data<T>(), kVector<T>); });
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<NormKernels> make_norm_kernels(Context& context) { return std::make_unique<CudaNorm>(context); }

}  // namespace lockstep::nn::cuda
