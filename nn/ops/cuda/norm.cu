#include "lockstep/nn/ops/norm.h"

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "nn/ops/cuda/columns.cuh"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cuda {
namespace {

// Note [Passes of batch normalisation]
// Forward reads x for its moments and again to normalise it; backward reads x and dy twice. Both passes have one plan:
// each block has the same rows in both, and goes over them from the last to the first in the second. So what the first
// has read last, as much as the second cache holds, is read there, and there for the last time (load_last).
//
// By Little's law an H200 wants 29 KB on their way to each of its 132 multiprocessors (4.8 TB/s · 0.8 µs / 132). With
// at most 64 registers a multiprocessor has four of forward's blocks, and 64 bytes on their way to each of their 1,024
// threads; backward, which keeps more of each column, has two blocks, and 128 bytes or more on their way to each of
// 512 threads. Grids are these blocks, all of them at once. A bf16 at the full speed of memory leaves a multiprocessor
// 16 instructions for each element of a tensor that a pass reads.
constexpr int kNormBlocks = kPartBlocks, kNormAtOnce = 4;
constexpr int kNormBackBlocks = 2 * 132, kNormBackAtOnce = 2;  // of a multiprocessor
constexpr int kNormRows = 4;                                   // of a thread at once

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

// From the sums of the distances from `pivot` and of their squares. Where that is the mean of some of the numbers,
// those squares are at most 1 + count / some times the result's, and as a rule hardly more: by so much the result's
// rounding is larger.
__device__ Moments moments_from(float count, float pivot, float sum, float squares) {
  if (!(count > 0.0f)) return {};
  const float apart = sum / count, spread = squares - sum * apart;
  return {count, pivot + apart, spread < 0.0f ? 0.0f : spread};  // this way round NaN passes
}

// The mean of kPivotRows rows of a chunk, which begin `at`.
constexpr int kPivotRows = 4;
template <int kWidth, class T>
__device__ Numbers<kWidth> pivot_of(const T* at, std::int64_t rows, std::int64_t columns) {
  Pack<T, kWidth> some[kPivotRows];
  for (int i = 0; i < kPivotRows; ++i) some[i] = load_pack<kWidth>(at + i * rows / kPivotRows * columns);
  Numbers<kWidth> made;
  for (int k = 0; k < kWidth; ++k) {
    const auto of_two = [&](int i) { return to_float(some[i].of[k]) + to_float(some[i + 1].of[k]); };
    made.of[k] = (of_two(0) + of_two(2)) * (1.0f / kPivotRows);  // of four equal numbers: that number
  }
  return made;
}

// parts (chunks, 2, C): mean and squares of each chunk, by way of the distances from its pivot.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock, kNormAtOnce) moments_of_chunks(ColumnPlan plan, const T* x, float* parts) {
  const Place at = place_in(plan);
  const std::int64_t columns = plan.packs * kWidth, begin = blockIdx.y * plan.chunk;
  float sums[2][kWidth] = {};
  if (at.pack < plan.packs) {
    const T* const own = x + at.pack * kWidth;
    const Numbers<kWidth> pivot = pivot_of<kWidth>(own + begin * columns, at.end - begin, columns);
    for_rows<kNormRows>(plan, at, [&](auto n, std::int64_t row) {
      constexpr int kRows = decltype(n)::value;
      Pack<T, kWidth> values[kRows];
      for (int i = 0; i < kRows; ++i) values[i] = load_pack<kWidth>(own + (row + i * plan.lines) * columns);
      for (int i = 0; i < kRows; ++i)
        for (int k = 0; k < kWidth; ++k) {
          const float apart = to_float(values[i].of[k]) - pivot.of[k];
          sums[0][k] += apart;
          sums[1][k] += apart * apart;
        }
    });
  }
  leave_sums(plan, sums, [&](std::int64_t column, const float(&made)[2]) {
    const std::int64_t rows = at.end - begin;
    const Numbers<1> pivot = pivot_of<1>(x + begin * columns + column, rows, columns);
    const Moments all = moments_from(static_cast<float>(rows), pivot.of[0], made[0], made[1]);
    float* const to = parts + blockIdx.y * 2 * columns + column;
    to[0] = all.mean;
    to[columns] = all.squares;
  });
}

// Running statistics, by how much they move, and the counter of their batches; nullptr: there are none.
struct RunningColumns {
  float keep = 1.0f, momentum = 0.0f, unbias = 1.0f;
  float* mean = nullptr;
  float* variance = nullptr;
  std::int64_t* batches = nullptr;

  __device__ void move(std::int64_t column, float to_mean, float to_variance) const {
    mean[column] = keep * mean[column] + momentum * to_mean;
    variance[column] = keep * variance[column] + momentum * unbias * to_variance;
    if (column == 0 && batches != nullptr) ++*batches;
  }
};

// `spread` becomes the sum of squares over `divisor`; where `rows` is not nullptr, it becomes their number.
__global__ void __launch_bounds__(kJoinBlock)
    join_chunks(ColumnPlan plan, std::int64_t columns, const float* parts, float divisor, float* mean, float* spread,
                float* rows, RunningColumns running) {
  const JoinPlace at = join_place();
  const bool known = at.column < columns;
  const float pivot = known && plan.chunks > 0 ? parts[at.column] : 0.0f;
  Numbers<2> mine = {};
  for (std::int64_t chunk = at.line; chunk < plan.chunks; chunk += kJoinAtOnce * kJoinLines) {
    float means[kJoinAtOnce] = {}, squares[kJoinAtOnce] = {}, counts[kJoinAtOnce] = {};
    for (int i = 0; i < kJoinAtOnce; ++i) {
      const std::int64_t own = chunk + i * kJoinLines;
      if (!known || own >= plan.chunks) continue;
      means[i] = parts[own * 2 * columns + at.column];
      squares[i] = parts[(own * 2 + 1) * columns + at.column];
      counts[i] = static_cast<float>(at_most(plan.rows - own * plan.chunk, plan.chunk));
    }
    for (int i = 0; i < kJoinAtOnce; ++i) {
      if (!(counts[i] > 0.0f)) continue;
      const float apart = means[i] - pivot;
      mine.of[0] += counts[i] * apart;
      mine.of[1] += squares[i] + counts[i] * apart * apart;
    }
  }
  const Numbers<2> sums = sum_of_lines(mine);
  if (at.line > 0 || !known) return;
  const Moments all = moments_from(static_cast<float>(plan.rows), pivot, sums.of[0], sums.of[1]);
  mean[at.column] = all.mean;
  const float shared_out = all.squares / divisor;
  spread[at.column] = shared_out;
  if (running.mean != nullptr) running.move(at.column, all.mean, shared_out);
  if (rows != nullptr && at.column == 0) *rows = static_cast<float>(plan.rows);
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

// What is known of a column: y = (x − middle) · scale + shift. Rounded in the same way wherever it is used: backward
// finds out from it which y were above 0.
__device__ float scale_of(float gamma, float variance, float eps) { return gamma / sqrtf(variance + eps); }
__device__ float normalised(float apart, float scale, float shift) { return __fmaf_rn(apart, scale, shift); }

// held becomes numbers_of(column) of the block's columns, each of them computed by one thread. All threads of the block
// take part.
template <int kWidth, int kCount, class F>
__device__ void hold_columns(const ColumnPlan& plan, float (&held)[kCount][kBlock], F&& numbers_of) {
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t column = std::int64_t{blockIdx.x} * plan.tile * kWidth + t;
  if (t < plan.tile * kWidth && column < plan.packs * kWidth) {
    const Numbers<kCount> made = numbers_of(column);
    for (int n = 0; n < kCount; ++n) held[n][t] = made.of[n];
  }
  __syncthreads();
}
// Those of the thread's pack.
template <int kWidth>
__device__ Numbers<kWidth> of_pack(const ColumnPlan& plan, const float (&held)[kBlock]) {
  Numbers<kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = held[static_cast<int>(threadIdx.x) % plan.tile * kWidth + k];
  return made;
}

// Whether what is stored of it is above 0 and below `top`, which is 6 or infinity. What rounds to 0 is at most half of
// the type's smallest number. What rounds to 6, an even one, is at least half of the step between numbers there below.
template <class T>
__device__ bool is_within(float value, float top) {
  constexpr bool kBFloat16 = std::is_same_v<T, BFloat16>, kFloat16 = std::is_same_v<T, Float16>;
  constexpr float kHalfOfSmallest = kBFloat16 ? 0x1p-134f : kFloat16 ? 0x1p-25f : 0.0f;
  constexpr float kHalfStep = kBFloat16 ? 0x1p-6f : kFloat16 ? 0x1p-9f : 0.0f;
  return value > kHalfOfSmallest && value < top - kHalfStep;
}

// How backward knows where y, to which a ReLU or ReLU6 was applied, is above 0, and below 6. Of a residual there is no
// ReLU6.
enum class MaskOf {
  kNone,         // there was no ReLU
  kNumbers,      // from x, of which y is computed again: that reads nothing more, where nothing was added to it
  kResult,       // from y
  kResultOfSum,  // from y, and dy is the sum of two
};

// y = (x − mean) / sqrt(variance + eps) · gamma + beta + residual, within [lowest, top]; without kAdded there is no
// residual.
template <int kWidth, bool kAdded, class T>
__global__ void __launch_bounds__(kBlock, kNormAtOnce)
    normalise(ColumnPlan plan, const T* x, const float* gamma, const float* beta, const float* mean,
              const float* variance, float eps, float lowest, float top, const T* residual, T* y) {
  constexpr int kAtOnce = kAdded ? 2 : 4;
  alignas(kVectorBytes) __shared__ float held[3][kBlock];
  hold_columns<kWidth>(plan, held, [&](std::int64_t c) {
    return Numbers<3>{scale_of(gamma[c], variance[c], eps), beta[c], mean[c]};
  });
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  const auto scale = of_pack<kWidth>(plan, held[0]), shift = of_pack<kWidth>(plan, held[1]);
  const auto middle = of_pack<kWidth>(plan, held[2]);
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  for_rows_back<kAtOnce>(plan, at, [&](auto n, std::int64_t row) {
    constexpr int kRows = decltype(n)::value;
    Pack<T, kWidth> values[kRows];
    [[maybe_unused]] Pack<T, kWidth> added[kRows];
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t place = (row + i * plan.lines) * columns + column;
      values[i] = load_last<kWidth>(x + place);
      if constexpr (kAdded) added[i] = load_last<kWidth>(residual + place);
    }
    for (int i = 0; i < kRows; ++i) {
      Numbers<kWidth> made;
      for (int k = 0; k < kWidth; ++k) {
        float value = normalised(to_float(values[i].of[k]) - middle.of[k], scale.of[k], shift.of[k]);
        if constexpr (kAdded) value += to_float(added[i].of[k]);
        made.of[k] = value < lowest ? lowest : value > top ? top : value;  // this way round NaN passes
      }
      store_rounded(y + (row + i * plan.lines) * columns + column, made);
    }
  });
}

// parts (chunks, 2, C): Σ dy · (x − mean) and Σ dy of each chunk, of those dy whose y is above 0 where there was a
// ReLU, and below `top`. With kResult the others are set to 0, with kResultOfSum after `more` was added to all of them.
template <int kWidth, MaskOf kMask, class T>
__global__ void __launch_bounds__(kBlock, kNormBackAtOnce)
    sums_of_chunks(ColumnPlan plan, const T* x, const T* y, T* dy, const T* more, const float* gamma, const float* beta,
                   const float* mean, const float* variance, float eps, float top, float* parts) {
  constexpr bool kFromResult = kMask == MaskOf::kResult || kMask == MaskOf::kResultOfSum;
  alignas(kVectorBytes) __shared__ float held[3][kBlock];
  hold_columns<kWidth>(plan, held, [&](std::int64_t c) {
    if constexpr (kMask == MaskOf::kNumbers)
      return Numbers<3>{scale_of(gamma[c], variance[c], eps), beta[c], mean[c]};
    else
      return Numbers<3>{0.0f, 0.0f, mean[c]};
  });
  const Place at = place_in(plan);
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  float sums[2][kWidth] = {};
  if (at.pack < plan.packs) {
    const auto scale = of_pack<kWidth>(plan, held[0]), shift = of_pack<kWidth>(plan, held[1]);
    const auto middle = of_pack<kWidth>(plan, held[2]);
    for_rows<kNormRows>(plan, at, [&](auto n, std::int64_t row) {
      constexpr int kRows = decltype(n)::value;
      Pack<T, kWidth> values[kRows], gradients[kRows];
      [[maybe_unused]] Pack<T, kWidth> results[kRows], others[kRows];
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t place = (row + i * plan.lines) * columns + column;
        values[i] = load_pack<kWidth>(x + place);
        gradients[i] = load_pack<kWidth>(dy + place);
        if constexpr (kFromResult) results[i] = load_last<kWidth>(y + place);
        if constexpr (kMask == MaskOf::kResultOfSum) others[i] = load_last<kWidth>(more + place);
      }
      for (int i = 0; i < kRows; ++i) {
        [[maybe_unused]] Numbers<kWidth> masked;
        for (int k = 0; k < kWidth; ++k) {
          const float apart = to_float(values[i].of[k]) - middle.of[k];
          float gradient = to_float(gradients[i].of[k]);
          if constexpr (kMask == MaskOf::kResultOfSum)
            gradient = to_float(from_float<T>(gradient + to_float(others[i].of[k])));
          if constexpr (kMask == MaskOf::kNumbers) {
            if (!is_within<T>(normalised(apart, scale.of[k], shift.of[k]), top)) gradient = 0.0f;
          } else if constexpr (kFromResult) {
            if (!(to_float(results[i].of[k]) > 0.0f)) gradient = 0.0f;
            masked.of[k] = gradient;
          }
          sums[0][k] += gradient * apart;
          sums[1][k] += gradient;
        }
        if constexpr (kFromResult) store_rounded(dy + (row + i * plan.lines) * columns + column, masked);
      }
    });
  }
  leave_sums(plan, sums, parts);
}

// dgamma = Σ dy · (x − mean) / sqrt(variance + eps), dbeta = Σ dy.
__global__ void __launch_bounds__(kJoinBlock)
    batch_norm_gradients(std::int64_t chunks, std::int64_t columns, const float* parts, const float* variance,
                         float eps, float* dgamma, float* dbeta) {
  const JoinPlace at = join_place();
  const Numbers<2> sums = join_sums<2>(chunks, columns, parts);
  if (at.line > 0 || at.column >= columns) return;
  dgamma[at.column] = sums.of[0] / sqrtf(variance[at.column] + eps);
  dbeta[at.column] = sums.of[1];
}

// With s = sqrt(variance + eps): dx = gamma / s · (dy − dbeta / M − (x − mean) / s · dgamma / M), or gamma / s · dy
// where the statistics were given and so do not depend on x (x is dy then, as something that is there). M is *all_rows,
// where other ranks have some of them. With kMasked those dy whose y, computed again, is not above 0 and below `top`
// count as 0.
template <int kWidth, bool kMasked, class T>
__global__ void __launch_bounds__(kBlock, kNormBackAtOnce)
    batch_norm_grad_input(ColumnPlan plan, const T* x, const T* dy, const float* gamma, const float* beta,
                          const float* mean, const float* variance, const float* dgamma, const float* dbeta,
                          const float* all_rows, float eps, float top, bool given_statistics, T* dx) {
  alignas(kVectorBytes) __shared__ float held[5][kBlock];
  hold_columns<kWidth>(plan, held, [&](std::int64_t c) {
    float one_of_rows = 1.0f / (all_rows != nullptr ? *all_rows : static_cast<float>(plan.rows));
    if (given_statistics) one_of_rows = 0.0f;
    return Numbers<5>{scale_of(gamma[c], variance[c], eps), beta[c], mean[c], dbeta[c] * one_of_rows,
                      dgamma[c] * one_of_rows / sqrtf(variance[c] + eps)};
  });
  const Place at = place_in(plan);
  if (at.pack >= plan.packs) return;
  const auto scale = of_pack<kWidth>(plan, held[0]), shift = of_pack<kWidth>(plan, held[1]);
  const auto middle = of_pack<kWidth>(plan, held[2]), offset = of_pack<kWidth>(plan, held[3]);
  const auto slope = of_pack<kWidth>(plan, held[4]);
  const std::int64_t columns = plan.packs * kWidth, column = at.pack * kWidth;
  for_rows_back<kNormRows>(plan, at, [&](auto n, std::int64_t row) {
    constexpr int kRows = decltype(n)::value;
    Pack<T, kWidth> values[kRows], gradients[kRows];
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t place = (row + i * plan.lines) * columns + column;
      values[i] = load_last<kWidth>(x + place);
      gradients[i] = load_last<kWidth>(dy + place);
    }
    for (int i = 0; i < kRows; ++i) {
      Numbers<kWidth> made;
      for (int k = 0; k < kWidth; ++k) {
        const float apart = to_float(values[i].of[k]) - middle.of[k];
        float gradient = to_float(gradients[i].of[k]);
        if (kMasked && !is_within<T>(normalised(apart, scale.of[k], shift.of[k]), top)) gradient = 0.0f;
        made.of[k] = scale.of[k] * (gradient - (offset.of[k] + apart * slope.of[k]));
      }
      store_rounded(dx + (row + i * plan.lines) * columns + column, made);
    }
  });
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
    const OpProfileScope scope(context_, "batch normalisation", {&x, &gamma, &beta, &y, &mean, &variance});
    take_moments(x, mean, variance, {});
    forward_infer(x, gamma, beta, mean, variance, eps, y);
  }

  void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, Epilogue activation,
                          const Tensor& residual, const Tensor& y, const Tensor& mean,
                          const Tensor& variance) override {
    const OpProfileScope scope(context_, "batch normalisation with ReLU",
                               {&x, &gamma, &beta, &residual, &y, &mean, &variance});
    take_moments(x, mean, variance, {});
    apply(x, gamma, beta, mean, variance, eps, activation, residual, y);
  }

  bool counts_batches() const override { return true; }
  void forward_train_moving(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, Epilogue activation,
                            const Tensor& residual, const Running& running, const Tensor& y, const Tensor& mean,
                            const Tensor& variance) override {
    const bool plain = activation == Epilogue::kNone;
    const OpProfileScope scope(context_, plain ? "batch normalisation" : "batch normalisation with ReLU",
                               {&x, &gamma, &beta, &residual, &y, &mean, &variance, &running.mean, &running.variance});
    if (mean.count() == 0) return;
    take_moments(
        x, mean, variance,
        running_of(x.count() / mean.count(), running.momentum, running.mean, running.variance, running.batches));
    apply(x, gamma, beta, mean, variance, eps, activation, residual, y);
  }

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    const OpProfileScope scope(context_, "batch normalisation", {&x, &gamma, &beta, &mean, &variance, &y});
    apply(x, gamma, beta, mean, variance, eps, Epilogue::kNone, Tensor(), y);
  }

  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                const Tensor& dbeta) override {
    const OpProfileScope scope(context_, "batch normalisation's backward",
                               {&x, &dy, &gamma, &mean, &variance, &dx, &dgamma, &dbeta});
    differentiate<MaskOf::kNone>(x, x, dy, dy, gamma, gamma, mean, variance, eps, given_statistics, dx, dgamma, dbeta);
  }

  void backward_relu(const Tensor& x, const Tensor& y, Epilogue activation, bool residual, const Tensor& dy,
                     const Tensor& gamma, const Tensor& beta, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) override {
    LOCKSTEP_ASSERT(!residual || activation == Epilogue::kRelu);
    const OpProfileScope scope(context_, "batch normalisation's backward with ReLU",
                               {&x, &y, &dy, &gamma, &beta, &mean, &variance, &dx, &dgamma, &dbeta});
    if (residual)
      differentiate<MaskOf::kResult>(x, y, dy, dy, gamma, beta, mean, variance, eps, false, dx, dgamma, dbeta);
    else
      differentiate<MaskOf::kNumbers>(x, x, dy, dy, gamma, beta, mean, variance, eps, false, dx, dgamma, dbeta,
                                      top_of(activation));
  }

  bool adds_gradients() const override { return true; }
  void backward_relu_added(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& more, const Tensor& gamma,
                           const Tensor& mean, const Tensor& variance, double eps, const Tensor& dx,
                           const Tensor& dgamma, const Tensor& dbeta) override {
    const OpProfileScope scope(context_, "batch normalisation's backward with ReLU",
                               {&x, &y, &dy, &more, &gamma, &mean, &variance, &dx, &dgamma, &dbeta});
    differentiate<MaskOf::kResultOfSum>(x, y, dy, more, gamma, gamma, mean, variance, eps, false, dx, dgamma, dbeta);
  }

  void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                      const Tensor& running_mean, const Tensor& running_variance) override {
    const OpProfileScope scope(context_, "running statistics", {&mean, &variance, &running_mean, &running_variance});
    const std::int64_t columns = mean.count();
    launch("running statistics", move_running, dim3(static_cast<unsigned>(ceil_div(columns, kBlock))), dim3(kBlock),
           context_.stream, columns, mean.f32(), variance.f32(),
           running_of(rows, momentum, running_mean, running_variance));
  }

  void moments(const Tensor& x, const Tensor& part) override {
    const OpProfileScope scope(context_, "batch statistics", {&x, &part});
    const std::int64_t columns = part.count() / 2;
    find_moments(x, columns, 1.0f, part.f32(), part.f32() + columns, part.f32() + 2 * columns, {});
  }

  void join_moments(const Tensor& parts, double momentum, const Tensor& mean, const Tensor& variance,
                    const Tensor& rows, const Tensor& running_mean, const Tensor& running_variance) override {
    const OpProfileScope scope(context_, "batch statistics",
                               {&parts, &mean, &variance, &rows, &running_mean, &running_variance});
    const std::int64_t columns = mean.count();
    launch("batch statistics", join_ranks, dim3(static_cast<unsigned>(ceil_div(columns, kBlock))), dim3(kBlock),
           context_.stream, columns, static_cast<int>(parts.size(0)), parts.size(1), parts.f32(), 1.0 - momentum,
           momentum, mean.f32(), variance.f32(), rows.f32(), running_mean.f32(), running_variance.f32());
  }

  void backward_sums(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& sums) override {
    const OpProfileScope scope(context_, "batch normalisation's backward", {&x, &dy, &mean, &variance, &sums});
    add_up<MaskOf::kNone>(x, x, dy, dy, mean, mean, mean, variance, eps, kInfinity, sums.f32(),
                          sums.f32() + mean.count());
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                      const Tensor& variance, const Tensor& rows, const Tensor& sums, double eps,
                      const Tensor& dx) override {
    const OpProfileScope scope(context_, "batch normalisation's backward",
                               {&x, &dy, &gamma, &mean, &variance, &rows, &sums, &dx});
    if (x.count() == 0) return;
    grad_input_to<false>(x, dy, gamma, gamma, mean, variance, sums.f32(), sums.f32() + mean.count(), rows.f32(), eps,
                         kInfinity, false, dx);
  }

 private:
  static RunningColumns running_of(std::int64_t rows, double momentum, const Tensor& mean, const Tensor& variance,
                                   const Tensor* batches = nullptr) {
    const double unbias = rows > 1 ? static_cast<double>(rows) / static_cast<double>(rows - 1) : 1.0;
    return {.keep = static_cast<float>(1.0 - momentum),
            .momentum = static_cast<float>(momentum),
            .unbias = static_cast<float>(unbias),
            .mean = mean.f32(),
            .variance = variance.f32(),
            .batches = batches != nullptr ? batches->data<std::int64_t>() : nullptr};
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
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / width, kNormBlocks, kNormRows);
        const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
        launch("batch statistics", moments_of_chunks<decltype(width)::value, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), parts.f32());
        launch("batch statistics", join_chunks, joiners(columns), dim3(kJoinBlock), context_.stream, plan, columns,
               parts.f32(), divisor, mean, spread, rows, running);
      });
    });
  }

  // `residual` may be undefined.
  void apply(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean, const Tensor& variance,
             double eps, Epilogue activation, const Tensor& residual, const Tensor& y) {
    if (x.count() == 0) return;
    const std::int64_t columns = mean.count();
    const Tensor& added = residual.defined() ? residual : x;
    LOCKSTEP_ASSERT(!residual.defined() || activation == Epilogue::kRelu);
    const float lowest = activation == Epilogue::kNone ? -kInfinity : 0.0f, top = top_of(activation);
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &y, &added}), [&](auto width) {
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / width, kNormBlocks, kNormRows);
        const auto start = [&](auto* kernel) {
          launch("batch normalisation", kernel, grid_of(plan), dim3(kBlock), context_.stream, plan, x.data<T>(),
                 gamma.f32(), beta.f32(), mean.f32(), variance.f32(), eps, lowest, top, added.data<T>(), y.data<T>());
        };
        if (residual.defined())
          start(normalise<decltype(width)::value, true, T>);
        else
          start(normalise<decltype(width)::value, false, T>);
      });
    });
  }

  // beta and top are read by a mask of x alone, y by one of y.
  template <MaskOf kMask>
  void differentiate(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& more, const Tensor& gamma,
                     const Tensor& beta, const Tensor& mean, const Tensor& variance, double eps, bool given_statistics,
                     const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta, float top = kInfinity) {
    if (mean.count() == 0) return;
    add_up<kMask>(x, y, dy, more, gamma, beta, mean, variance, eps, top, dgamma.f32(), dbeta.f32());
    grad_input_to<kMask == MaskOf::kNumbers>(given_statistics ? dy : x, dy, gamma, beta, mean, variance, dgamma.f32(),
                                             dbeta.f32(), nullptr, eps, top, given_statistics, dx);
  }

  template <MaskOf kMask>
  void add_up(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& more, const Tensor& gamma,
              const Tensor& beta, const Tensor& mean, const Tensor& variance, double eps, float top, float* dgamma,
              float* dbeta) {
    const std::int64_t columns = mean.count();
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &y, &dy, &more}), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / kWidth, kNormBackBlocks, kNormRows);
        const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks, 2, columns});
        launch("batch normalisation's backward", sums_of_chunks<kWidth, kMask, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), y.data<T>(), dy.data<T>(), more.data<T>(), gamma.f32(), beta.f32(),
               mean.f32(), variance.f32(), eps, top, parts.f32());
        // Without rows, too: zeros.
        launch("batch normalisation's backward", batch_norm_gradients, joiners(columns), dim3(kJoinBlock),
               context_.stream, plan.chunks, columns, parts.f32(), variance.f32(), eps, dgamma, dbeta);
      });
    });
  }

  template <bool kMasked>
  void grad_input_to(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, const float* dgamma, const float* dbeta, const float* all_rows, double eps,
                     float top, bool given_statistics, const Tensor& dx) {
    const std::int64_t columns = mean.count();
    with_float_type(x.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(columns, {&x, &dy, &dx}), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const ColumnPlan plan = plan_columns(x.count() / columns, columns / kWidth, kNormBackBlocks, kNormRows);
        launch("batch normalisation's backward", batch_norm_grad_input<kWidth, kMasked, T>, grid_of(plan), dim3(kBlock),
               context_.stream, plan, x.data<T>(), dy.data<T>(), gamma.f32(), beta.f32(), mean.f32(), variance.f32(),
               dgamma, dbeta, all_rows, eps, top, given_statistics, dx.data<T>());
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
