// The arithmetic of elementwise kernels, once for all devices.
#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/nn/ops/linear.h"
#include "lockstep/nn/ops/pointwise.h"

namespace lockstep::nn {

/// Note [Elementwise rules]
/// A function of elements is a rule here with its row in the list below, a declaration in
/// lockstep/nn/autograd/functions.h, and a row of tests/nn/elementwise_cases.h. Its forward, its backward and the
/// kernels of the CPU and of CUDA are compiled from the rule, as those of optimizers are (Note [Update rules]): all is
/// constexpr for nvcc's sake. A unary rule has value(x), and slope(x, y), its derivative where y is value(x). A binary
/// one has value(x, y), and slope_x(x, y) and slope_y(x, y). Some take the functions that a device is fast at, as
/// `Math`.

/// A rule of f32 alone, which losses are computed in.
struct LossRule {
  static constexpr bool kAllTypes = false;
  static constexpr bool kReadsX = true, kReadsY = true;  // what slope() reads
};
/// Of all types of activations. Each is widened to f32, and the result is rounded once.
struct ActivationRule {
  static constexpr bool kAllTypes = true;
  static constexpr bool kReadsX = true, kReadsY = false;
};
/// A value is x or 0, as passes() says of x; a gradient is dy or 0, as slope_passes() says of y. 0 · infinity is 0
/// here.
template <class Rule>
concept MasksValues = requires {
  Rule::passes(0.0f);
};
template <class Rule>
concept MasksGradients = requires {
  Rule::slope_passes(0.0f);
};

/// Math of any device.
struct PlainMath {
  static constexpr float exp(float x) { return std::exp(x); }
  static constexpr float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
  /// The normal distribution's function at √2 z; the density is exp(-z²).
  static constexpr float normal(float z, float) { return 0.5f * (1.0f + std::erf(z)); }
  /// a (x + b x³). In the order of each device's first release: another one has other bits.
  static constexpr float cubic(float x, float a, float b) { return a * x * (1.0f + b * x * x); }
};

struct AbsRule : LossRule {
  static constexpr float value(float x) { return x < 0 ? -x : x; }
  static constexpr float slope(float x, float) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
};
struct ExpRule : LossRule {
  static constexpr float value(float x) { return std::exp(x); }
  static constexpr float slope(float, float y) { return y; }
};
struct LogRule : LossRule {
  static constexpr float value(float x) { return std::log(x); }
  static constexpr float slope(float x, float) { return 1.0f / x; }
};
struct SqrtRule : LossRule {
  static constexpr float value(float x) { return std::sqrt(x); }
  static constexpr float slope(float, float y) { return 0.5f / y; }
};
struct SquareRule : LossRule {
  static constexpr float value(float x) { return x * x; }
  static constexpr float slope(float x, float) { return 2.0f * x; }
};
struct SinRule : LossRule {
  static constexpr float value(float x) { return std::sin(x); }
  static constexpr float slope(float x, float) { return std::cos(x); }
};
struct CosRule : LossRule {
  static constexpr float value(float x) { return std::cos(x); }
  static constexpr float slope(float x, float) { return -std::sin(x); }
};
struct TanhRule : LossRule {
  static constexpr float value(float x) { return std::tanh(x); }
  static constexpr float slope(float, float y) { return 1.0f - y * y; }
};
struct SigmoidRule : LossRule {
  // Either way the exponential is at most 1.
  static constexpr float value(float x) {
    const float e = std::exp(x < 0 ? x : -x);
    return x < 0 ? e / (1.0f + e) : 1.0f / (1.0f + e);
  }
  static constexpr float slope(float, float y) { return y * (1.0f - y); }
};
struct SoftplusRule : LossRule {
  static constexpr float value(float x) { return (x > 0 ? x : 0.0f * x) + std::log1p(std::exp(x < 0 ? x : -x)); }
  static constexpr float slope(float x, float) { return SigmoidRule::value(x); }
};

struct ReluRule : ActivationRule {
  static constexpr bool kReadsX = false, kReadsY = true;
  static constexpr bool passes(float x) { return !(x < 0.0f); }  // this way round NaN passes
  static constexpr bool slope_passes(float y) { return y > 0.0f; }
};
struct Relu6Rule : ActivationRule {
  static constexpr bool kReadsX = false, kReadsY = true;
  static constexpr float kTop = 6.0f;
  static constexpr float value(float x) { return x < 0.0f ? 0.0f : x > kTop ? kTop : x; }  // this way round NaN passes
  static constexpr bool slope_passes(float y) { return y > 0.0f && y < kTop; }
};
/// The largest value of an activation inside of a batch normalisation.
constexpr float top_of(Epilogue activation) {
  return activation == Epilogue::kRelu6 ? Relu6Rule::kTop : std::numeric_limits<float>::infinity();
}
struct SiluRule : ActivationRule {
  template <class Math>
  static constexpr float value(float x) {
    return x * Math::sigmoid(x);
  }
  template <class Math>
  static constexpr float slope(float x, float) {
    const float s = Math::sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
  }
};
struct GeluErfRule : ActivationRule {
  static constexpr float kSqrtHalf = 0.707106781f;
  static constexpr float kDensity = 0.398942280f;  // 1 / √(2 π)
  template <class Math>
  static constexpr float value(float x) {
    return x * Math::normal(x * kSqrtHalf, Math::exp(-0.5f * x * x));
  }
  template <class Math>
  static constexpr float slope(float x, float) {
    const float density = Math::exp(-0.5f * x * x);
    return Math::normal(x * kSqrtHalf, density) + x * kDensity * density;
  }
};
struct GeluTanhRule : ActivationRule {
  static constexpr float kScale = 1.59576912f;  // 2 √(2 / π): (1 + tanh(u)) / 2 is the logistic function of 2 u
  static constexpr float kCubic = 0.044715f;
  template <class Math>
  static constexpr float value(float x) {
    return x * Math::sigmoid(Math::cubic(x, kScale, kCubic));
  }
  template <class Math>
  static constexpr float slope(float x, float) {
    const float square = x * x, s = Math::sigmoid(kScale * x * (1.0f + kCubic * square));
    return s + x * s * (1.0f - s) * kScale * (1.0f + 3.0f * kCubic * square);
  }
};

struct AddRule : ActivationRule {
  static constexpr float value(float x, float y) { return x + y; }
  static constexpr float slope_x(float, float) { return 1.0f; }
  static constexpr float slope_y(float, float) { return 1.0f; }
};
struct AddReluRule : ActivationRule {
  static constexpr float value(float x, float y) { return x + y < 0.0f ? 0.0f : x + y; }
  static constexpr float slope_x(float x, float y) { return x + y > 0.0f ? 1.0f : 0.0f; }
  static constexpr float slope_y(float x, float y) { return slope_x(x, y); }
};
struct SubRule : LossRule {
  static constexpr float value(float x, float y) { return x - y; }
  static constexpr float slope_x(float, float) { return 1.0f; }
  static constexpr float slope_y(float, float) { return -1.0f; }
};
struct MulRule : LossRule {
  static constexpr float value(float x, float y) { return x * y; }
  static constexpr float slope_x(float, float y) { return y; }
  static constexpr float slope_y(float x, float) { return x; }
};
struct DivRule : LossRule {
  static constexpr float value(float x, float y) { return x / y; }
  static constexpr float slope_x(float, float y) { return 1.0f / y; }
  static constexpr float slope_y(float x, float y) { return -x / (y * y); }
};
struct MinRule : LossRule {
  static constexpr float value(float x, float y) { return x < y || x != x ? x : y; }
  static constexpr float slope_x(float x, float y) { return x < y ? 1.0f : x > y ? 0.0f : 0.5f; }
  static constexpr float slope_y(float x, float y) { return 1.0f - slope_x(x, y); }
};
struct MaxRule : LossRule {
  static constexpr float value(float x, float y) { return x > y || x != x ? x : y; }
  static constexpr float slope_x(float x, float y) { return x > y ? 1.0f : x < y ? 0.0f : 0.5f; }
  static constexpr float slope_y(float x, float y) { return 1.0f - slope_x(x, y); }
};

/// The functions of functions.h that these rules are all of: OP(Name, function, what it is called in messages).
#define LOCKSTEP_UNARY_FUNCTIONS(OP) \
  OP(Abs, abs, "abs")                \
  OP(Exp, exp, "exp")                \
  OP(Log, log, "log")                \
  OP(Sqrt, sqrt, "sqrt")             \
  OP(Square, square, "square")       \
  OP(Sin, sin, "sin")                \
  OP(Cos, cos, "cos")                \
  OP(Tanh, tanh, "tanh")             \
  OP(Sigmoid, sigmoid, "sigmoid")    \
  OP(Softplus, softplus, "softplus") \
  OP(Relu, relu, "ReLU")             \
  OP(Relu6, relu6, "ReLU6")          \
  OP(Silu, silu, "SiLU")
#define LOCKSTEP_BINARY_FUNCTIONS(OP) \
  OP(Sub, sub, "sub")                 \
  OP(Mul, mul, "mul")                 \
  OP(Div, div, "div")                 \
  OP(Min, minimum, "minimum")         \
  OP(Max, maximum, "maximum")
/// And those that functions of their own call.
#define LOCKSTEP_UNARY_OPS(OP) \
  LOCKSTEP_UNARY_FUNCTIONS(OP) \
  OP(GeluErf, gelu, "GELU")    \
  OP(GeluTanh, gelu, "GELU")
#define LOCKSTEP_BINARY_OPS(OP) \
  LOCKSTEP_BINARY_FUNCTIONS(OP) \
  OP(Add, add, "adding")        \
  OP(AddRelu, add_relu, "adding")

#define LOCKSTEP_OP_NUMBER(Name, function, title) k##Name,
enum class UnaryOp : std::uint8_t { LOCKSTEP_UNARY_OPS(LOCKSTEP_OP_NUMBER) };
enum class BinaryOp : std::uint8_t { LOCKSTEP_BINARY_OPS(LOCKSTEP_OP_NUMBER) };
#undef LOCKSTEP_OP_NUMBER
#define LOCKSTEP_OP_COUNT(Name, function, title) +1
constexpr std::size_t kUnaryOps = 0 LOCKSTEP_UNARY_OPS(LOCKSTEP_OP_COUNT);
constexpr std::size_t kBinaryOps = 0 LOCKSTEP_BINARY_OPS(LOCKSTEP_OP_COUNT);
#undef LOCKSTEP_OP_COUNT

constexpr UnaryOp op_of(GeluKind kind) { return kind == GeluKind::kTanh ? UnaryOp::kGeluTanh : UnaryOp::kGeluErf; }

/// Texts that are never released.
struct OpNames {
  const char* function;
  const char* title;
  const char* backward;
};
#define LOCKSTEP_OP_CASE(Name, function, title) \
  case Op::k##Name: return use(Name##Rule(), OpNames{#function, title, title "'s backward"});
/// Calls `use` with the rule of `op` and its names.
template <class Use>
decltype(auto) with_rule(UnaryOp op, const Use& use) {
  using Op = UnaryOp;
  switch (op) { LOCKSTEP_UNARY_OPS(LOCKSTEP_OP_CASE) }
  throw InternalError("an elementwise operation that there is none of");
}
template <class Use>
decltype(auto) with_rule(BinaryOp op, const Use& use) {
  using Op = BinaryOp;
  switch (op) { LOCKSTEP_BINARY_OPS(LOCKSTEP_OP_CASE) }
  throw InternalError("an elementwise operation that there is none of");
}
#undef LOCKSTEP_OP_CASE

/// Of one element each.
template <class Rule, class Math = PlainMath>
constexpr float value_of(float x) {
  if constexpr (MasksValues<Rule>)
    return Rule::passes(x) ? x : 0.0f;
  else if constexpr (requires { Rule::value(x); })
    return Rule::value(x);
  else
    return Rule::template value<Math>(x);
}
template <class Rule, class Math = PlainMath>
constexpr float gradient_of(float x, float y, float dy) {
  if constexpr (MasksGradients<Rule>)
    return Rule::slope_passes(y) ? dy : 0.0f;
  else if constexpr (requires { Rule::slope(x, y); })
    return dy * Rule::slope(x, y);
  else
    return dy * Rule::template slope<Math>(x, y);
}

}  // namespace lockstep::nn
