// The arithmetic of elementwise kernels, once for all devices.
#pragma once

#include <cmath>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/nn/ops/elementwise.h"

namespace lockstep::nn {

/// Note [Elementwise rules]
/// A rule of a UnaryOp has value(x), and slope(x, y), its derivative where y is value(x). One of a BinaryOp has
/// value(x, y), and slope_x(x, y) and slope_y(x, y). The kernels of the CPU and of CUDA are compiled from them, as
/// those of optimizers are (Note [Update rules]): all is constexpr for nvcc's sake.

struct AbsRule {
  static constexpr float value(float x) { return x < 0 ? -x : x; }
  static constexpr float slope(float x, float) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
};
struct ExpRule {
  static constexpr float value(float x) { return std::exp(x); }
  static constexpr float slope(float, float y) { return y; }
};
struct LogRule {
  static constexpr float value(float x) { return std::log(x); }
  static constexpr float slope(float x, float) { return 1.0f / x; }
};
struct SqrtRule {
  static constexpr float value(float x) { return std::sqrt(x); }
  static constexpr float slope(float, float y) { return 0.5f / y; }
};
struct SquareRule {
  static constexpr float value(float x) { return x * x; }
  static constexpr float slope(float x, float) { return 2.0f * x; }
};
struct SinRule {
  static constexpr float value(float x) { return std::sin(x); }
  static constexpr float slope(float x, float) { return std::cos(x); }
};
struct CosRule {
  static constexpr float value(float x) { return std::cos(x); }
  static constexpr float slope(float x, float) { return -std::sin(x); }
};
struct TanhRule {
  static constexpr float value(float x) { return std::tanh(x); }
  static constexpr float slope(float, float y) { return 1.0f - y * y; }
};
struct SigmoidRule {
  // Either way the exponential is at most 1.
  static constexpr float value(float x) {
    const float e = std::exp(x < 0 ? x : -x);
    return x < 0 ? e / (1.0f + e) : 1.0f / (1.0f + e);
  }
  static constexpr float slope(float, float y) { return y * (1.0f - y); }
};
struct SoftplusRule {
  static constexpr float value(float x) { return (x > 0 ? x : 0.0f * x) + std::log1p(std::exp(x < 0 ? x : -x)); }
  static constexpr float slope(float x, float) { return SigmoidRule::value(x); }
};

struct SubRule {
  static constexpr float value(float x, float y) { return x - y; }
  static constexpr float slope_x(float, float) { return 1.0f; }
  static constexpr float slope_y(float, float) { return -1.0f; }
};
struct MulRule {
  static constexpr float value(float x, float y) { return x * y; }
  static constexpr float slope_x(float, float y) { return y; }
  static constexpr float slope_y(float x, float) { return x; }
};
struct DivRule {
  static constexpr float value(float x, float y) { return x / y; }
  static constexpr float slope_x(float, float y) { return 1.0f / y; }
  static constexpr float slope_y(float x, float y) { return -x / (y * y); }
};
struct MinRule {
  static constexpr float value(float x, float y) { return x < y || x != x ? x : y; }
  static constexpr float slope_x(float x, float y) { return x < y ? 1.0f : x > y ? 0.0f : 0.5f; }
  static constexpr float slope_y(float x, float y) { return 1.0f - slope_x(x, y); }
};
struct MaxRule {
  static constexpr float value(float x, float y) { return x > y || x != x ? x : y; }
  static constexpr float slope_x(float x, float y) { return x > y ? 1.0f : x < y ? 0.0f : 0.5f; }
  static constexpr float slope_y(float x, float y) { return 1.0f - slope_x(x, y); }
};

/// Calls `use` with the rule of `op`.
template <class Use>
void with_rule(UnaryOp op, const Use& use) {
  switch (op) {
    case UnaryOp::kAbs: return use(AbsRule());
    case UnaryOp::kExp: return use(ExpRule());
    case UnaryOp::kLog: return use(LogRule());
    case UnaryOp::kSqrt: return use(SqrtRule());
    case UnaryOp::kSquare: return use(SquareRule());
    case UnaryOp::kSin: return use(SinRule());
    case UnaryOp::kCos: return use(CosRule());
    case UnaryOp::kTanh: return use(TanhRule());
    case UnaryOp::kSigmoid: return use(SigmoidRule());
    case UnaryOp::kSoftplus: return use(SoftplusRule());
  }
  throw InternalError("an elementwise operation that there is none of");
}
template <class Use>
void with_rule(BinaryOp op, const Use& use) {
  switch (op) {
    case BinaryOp::kSub: return use(SubRule());
    case BinaryOp::kMul: return use(MulRule());
    case BinaryOp::kDiv: return use(DivRule());
    case BinaryOp::kMin: return use(MinRule());
    case BinaryOp::kMax: return use(MaxRule());
  }
  throw InternalError("an elementwise operation that there is none of");
}

}  // namespace lockstep::nn
