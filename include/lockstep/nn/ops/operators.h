// Operators that are declared once: settings, shapes, kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <variant>

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Note [Operators]
/// An operator of one f32 value is a struct here, with its settings, its name, and shape(), which returns the result's
/// shape or throws UsageError, and its place at the end of `Operator`. nn::apply() calls it; functions.h gives it a
/// function of its own. Checks, the result, the tape's node and tensors without data follow. A device's class (in
/// nn/ops/cpu/operators.cpp, nn/ops/cuda/operators.cu) compiles only with compute() and differentiate() for each, and a
/// row of tests/nn/operator_cases.h compares both with the formula. What differentiate() reads besides the gradient
/// is declared: kReadsX, kReadsY.

/// scale · x + shift
struct Affine {
  static constexpr const char* kName = "affine";
  float scale = 1.0f, shift = 0.0f;
  static const Shape& shape(const Shape& x) { return x; }
};
/// x (…, C) → (…): sums over the last axis.
struct SumLast {
  static constexpr const char* kName = "sum_last";
  static Shape shape(const Shape& x) {
    if (x.size() < 1 || x[x.size() - 1] < 1)
      throw UsageError("sum_last of " + to_string(x), "its last axis has at least one number");
    return Shape(x.dims().first(static_cast<std::size_t>(x.size() - 1)));
  }
};
/// x (…) → (…, count): each number as often as that.
struct SpreadLast {
  static constexpr const char* kName = "spread_last";
  std::int64_t count = 1;
  Shape shape(const Shape& x) const {
    if (count < 1 || x.size() == Shape::kMaxDims)
      throw UsageError("spread_last of " + to_string(x) + " over " + std::to_string(count),
                       "give at least 1, and at most " + std::to_string(Shape::kMaxDims - 1) + " axes");
    return x.with_last(count);
  }
};

/// Of each row of the last axis, at least one number long: what these operators ask for.
inline const Shape& check_rows(const char* op, const Shape& x) {
  if (x.size() < 1 || x[x.size() - 1] < 1)
    throw UsageError(std::string(op) + " of " + to_string(x), "its last axis has at least one number");
  return x;
}
/// x (…, C) → (…): the largest of the last axis. Those that are equal share the gradient, as in PyTorch's amax.
struct MaxLast {
  static constexpr const char* kName = "max_last";
  static constexpr bool kReadsX = true, kReadsY = true;
  static Shape shape(const Shape& x) {
    return Shape(check_rows(kName, x).dims().first(static_cast<std::size_t>(x.size() - 1)));
  }
};
/// eˣ / Σ eˣ over the last axis, computed from x − max x. A row of −∞ alone is NaN.
struct SoftmaxLast {
  static constexpr const char* kName = "softmax";
  static constexpr bool kReadsY = true;
  static const Shape& shape(const Shape& x) { return check_rows(kName, x); }
};
/// Its logarithm: x − max x − ln Σ e^(x − max x).
struct LogSoftmaxLast {
  static constexpr const char* kName = "log_softmax";
  static constexpr bool kReadsY = true;
  static const Shape& shape(const Shape& x) { return check_rows(kName, x); }
};
/// (x − mean) / √(variance + eps) of each row of the last axis, with its biased variance; without `centered` x /
/// √(mean x² + eps) (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).
struct NormalizeLast {
  static constexpr const char* kName = "normalize_last";
  static constexpr bool kReadsX = true;
  float eps = 1e-5f;
  bool centered = true;
  static const Shape& shape(const Shape& x) { return check_rows(kName, x); }
};
/// x ^ exponent, NaN where x < 0 and the exponent is no integer.
struct Pow {
  static constexpr const char* kName = "pow";
  static constexpr bool kReadsX = true;
  float exponent = 1.0f;
  static const Shape& shape(const Shape& x) { return x; }
};
/// x, at least `low` and at most `high`. The gradient passes from low to high, both among them.
struct Clamp {
  static constexpr const char* kName = "clamp";
  static constexpr bool kReadsX = true;
  float low = 0.0f, high = 1.0f;
  static const Shape& shape(const Shape& x) { return x; }
};

// Of an element, for all devices.
constexpr float pow_slope(const Pow& op, float x) {
  return op.exponent == 0.0f ? 0.0f : op.exponent * std::pow(x, op.exponent - 1.0f);
}
constexpr float clamped(const Clamp& op, float x) { return x < op.low ? op.low : x > op.high ? op.high : x; }
constexpr bool is_within(const Clamp& op, float x) { return x >= op.low && x <= op.high; }

struct Operator
    : std::variant<Affine, SumLast, SpreadLast, MaxLast, SoftmaxLast, LogSoftmaxLast, NormalizeLast, Pow, Clamp> {
  using variant::variant;
};

/// All tensors are f32 and contiguous. NaN stays NaN.
class OperatorKernels {
 public:
  virtual ~OperatorKernels() = default;
  /// y = op(x), of op's shape. y of Affine and of Clamp may be x.
  virtual void forward(const Operator& op, const Tensor& x, const Tensor& y) {}
  /// dx of dy, overwritten. x and y, forward()'s, are undefined where op does not read them.
  virtual void backward(const Operator& op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
