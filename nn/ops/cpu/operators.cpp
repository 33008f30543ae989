#include "lockstep/nn/ops/operators.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements; a thread that gets fewer costs more than it brings

/// Calls body(i) for all elements, a thread for each stretch of them.
template <class Body>
void for_each(std::int64_t count, const Body& body) {
  parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  });
}

LOCKSTEP_SIMD_CLONES void max_row(const float* x, std::int64_t n, float* y) {
  const float largest = lane_max(n, [=](std::int64_t i) { return x[i]; });
  // 0, or NaN where one of them is.
  *y = largest + 0.0f * lane_sum(n, [=](std::int64_t i) { return x[i] == x[i] ? 0.0f : x[i]; });
}
LOCKSTEP_SIMD_CLONES void max_row_back(const float* x, float y, float dy, std::int64_t n, float* dx) {
  const auto is_largest = [=](float value) { return value == y || (value != value && y != y) ? 1.0f : 0.0f; };
  const float each = dy / lane_sum(n, [=](std::int64_t i) { return is_largest(x[i]); });
  for (std::int64_t i = 0; i < n; ++i) dx[i] = is_largest(x[i]) != 0.0f ? each : 0.0f;
}
LOCKSTEP_SIMD_CLONES void softmax_row(const float* x, std::int64_t n, float* y) {
  const float largest = lane_max(n, [=](std::int64_t i) { return x[i]; });
  for (std::int64_t i = 0; i < n; ++i) y[i] = exp_of(x[i] - largest);
  const float scale = 1.0f / lane_sum(n, [=](std::int64_t i) { return y[i]; });
  for (std::int64_t i = 0; i < n; ++i) y[i] *= scale;
}
LOCKSTEP_SIMD_CLONES void softmax_row_back(const float* y, const float* dy, std::int64_t n, float* dx) {
  const float mean = lane_sum(n, [=](std::int64_t i) { return y[i] * dy[i]; });
  for (std::int64_t i = 0; i < n; ++i) dx[i] = y[i] * (dy[i] - mean);
}
LOCKSTEP_SIMD_CLONES void log_softmax_row(const float* x, std::int64_t n, float* y) {
  const float largest = lane_max(n, [=](std::int64_t i) { return x[i]; });
  const float sum = lane_sum(n, [=](std::int64_t i) { return exp_of(x[i] - largest); });
  const float logarithm = std::log(sum);
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] - largest) - logarithm;
}
LOCKSTEP_SIMD_CLONES void log_softmax_row_back(const float* y, const float* dy, std::int64_t n, float* dx) {
  const float sum = lane_sum(n, [=](std::int64_t i) { return dy[i]; });
  for (std::int64_t i = 0; i < n; ++i) dx[i] = dy[i] - exp_of(y[i]) * sum;
}

struct RowMoments {
  float mean, inverse;
};
[[gnu::always_inline]] inline RowMoments moments_of(const NormalizeLast& op, const float* x, std::int64_t n) {
  const auto count = static_cast<float>(n);
  const float mean = op.centered ? lane_sum(n, [=](std::int64_t i) { return x[i]; }) / count : 0.0f;
  const float squares = lane_sum(n, [=](std::int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, 1.0f / __builtin_sqrtf(squares / count + op.eps)};
}
LOCKSTEP_SIMD_CLONES void normalize_row(const NormalizeLast& op, const float* x, std::int64_t n, float* y) {
  const RowMoments row = moments_of(op, x, n);
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] - row.mean) * row.inverse;
}
LOCKSTEP_SIMD_CLONES void normalize_row_back(const NormalizeLast& op, const float* x, const float* dy, std::int64_t n,
                                             float* dx) {
  const RowMoments row = moments_of(op, x, n);
  const auto y = [=](std::int64_t i) { return (x[i] - row.mean) * row.inverse; };
  const auto count = static_cast<float>(n);
  const float along = lane_sum(n, [=](std::int64_t i) { return dy[i] * y(i); }) / count;
  const float mean = op.centered ? lane_sum(n, [=](std::int64_t i) { return dy[i]; }) / count : 0.0f;
  for (std::int64_t i = 0; i < n; ++i) dx[i] = row.inverse * (dy[i] - mean - y(i) * along);
}

using T = const Tensor&;

class CpuOperators final : public OperatorKernels {
 public:
  void forward(const Operator& op, T x, T y) override {
    std::visit([&](const auto& one) { compute(one, x, y); }, op);
  }
  void backward(const Operator& op, T x, T y, T dy, T dx) override {
    std::visit([&](const auto& one) { differentiate(one, x, y, dy, dx); }, op);
  }

 private:
  static void compute(const Affine& op, T x, T y) {
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t i) { to[i] = op.scale * from[i] + op.shift; });
  }
  static void differentiate(const Affine& op, T, T, T dy, T dx) { compute(Affine{op.scale, 0.0f}, dy, dx); }

  static void compute(const SumLast&, T x, T y) {
    const std::int64_t columns = x.size(x.shape().size() - 1);
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t row) {
      double sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) sum += static_cast<double>(from[row * columns + i]);
      to[row] = static_cast<float>(sum);
    });
  }
  static void differentiate(const SumLast&, T, T, T dy, T dx) {
    compute(SpreadLast{dx.size(dx.shape().size() - 1)}, dy, dx);
  }

  static void compute(const SpreadLast& op, T x, T y) {
    const std::int64_t columns = op.count;
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(x.count(), [=](std::int64_t row) { std::fill_n(to + row * columns, columns, from[row]); });
  }
  static void differentiate(const SpreadLast&, T, T, T dy, T dx) { compute(SumLast(), dy, dx); }

  static void compute(const MaxLast&, T x, T y) {
    map_rows(x, [from = x.f32(), to = y.f32()](std::int64_t row, std::int64_t at, std::int64_t n) {
      max_row(from + at, n, to + row);
    });
  }
  static void differentiate(const MaxLast&, T x, T y, T dy, T dx) {
    map_rows(x, [at_x = x.f32(), at_y = y.f32(), from = dy.f32(), to = dx.f32()](std::int64_t row, std::int64_t at,
                                                                                 std::int64_t n) {
      max_row_back(at_x + at, at_y[row], from[row], n, to + at);
    });
  }

  static void compute(const SoftmaxLast&, T x, T y) {
    map_rows(x, [from = x.f32(), to = y.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      softmax_row(from + at, n, to + at);
    });
  }
  static void differentiate(const SoftmaxLast&, T, T y, T dy, T dx) {
    map_rows(y, [value = y.f32(), from = dy.f32(), to = dx.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      softmax_row_back(value + at, from + at, n, to + at);
    });
  }

  static void compute(const LogSoftmaxLast&, T x, T y) {
    map_rows(x, [from = x.f32(), to = y.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      log_softmax_row(from + at, n, to + at);
    });
  }
  static void differentiate(const LogSoftmaxLast&, T, T y, T dy, T dx) {
    map_rows(y, [value = y.f32(), from = dy.f32(), to = dx.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      log_softmax_row_back(value + at, from + at, n, to + at);
    });
  }

  static void compute(const NormalizeLast& op, T x, T y) {
    map_rows(x, [&op, from = x.f32(), to = y.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      normalize_row(op, from + at, n, to + at);
    });
  }
  static void differentiate(const NormalizeLast& op, T x, T, T dy, T dx) {
    map_rows(x, [&op, at_x = x.f32(), from = dy.f32(), to = dx.f32()](std::int64_t, std::int64_t at, std::int64_t n) {
      normalize_row_back(op, at_x + at, from + at, n, to + at);
    });
  }

  static void compute(const Pow& op, T x, T y) {
    for_each(y.count(), [=, from = x.f32(), to = y.f32()](std::int64_t i) { to[i] = std::pow(from[i], op.exponent); });
  }
  static void differentiate(const Pow& op, T x, T, T dy, T dx) {
    for_each(dx.count(), [=, at = x.f32(), from = dy.f32(), to = dx.f32()](std::int64_t i) {
      to[i] = from[i] * pow_slope(op, at[i]);
    });
  }

  static void compute(const Clamp& op, T x, T y) {
    for_each(y.count(), [=, from = x.f32(), to = y.f32()](std::int64_t i) { to[i] = clamped(op, from[i]); });
  }
  static void differentiate(const Clamp& op, T x, T, T dy, T dx) {
    for_each(dx.count(), [=, at = x.f32(), from = dy.f32(), to = dx.f32()](std::int64_t i) {
      to[i] = is_within(op, at[i]) ? from[i] : 0.0f;
    });
  }

  /// Calls body(row, its first element, how many) for the rows of the last axis of x.
  template <class Body>
  static void map_rows(T x, const Body& body) {
    const std::int64_t columns = x.size(x.shape().size() - 1);
    parallel_for(x.count() / columns, std::max<std::int64_t>(1, kGrain / columns),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) body(row, row * columns, columns);
                 });
  }
};

}  // namespace

std::unique_ptr<OperatorKernels> make_operator_kernels() { return std::make_unique<CpuOperators>(); }

}  // namespace lockstep::nn::cpu
