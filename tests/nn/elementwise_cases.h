// A row for each function of elements (Note [Elementwise rules]). Tests take from it the function's values, its
// gradient, and its kernels on all devices and in all types.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lockstep/nn/autograd/functions.h"
#include "nn/ops/elementwise_rules.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

/// How far two devices may be apart: `ulps` units in the last place of `scale`; with 0 they have the same numbers.
struct Apart {
  double ulps = 4.0, scale = 1.0;
};

struct UnaryCase {
  UnaryOp op;
  Var (*function)(Tape&, Var);
  double (*value)(double);
  float middle = 0.0f, spread = 1.0f;  // it is tried on [middle - spread, middle + spread)
  Apart forward = {}, backward = {};
};
inline const UnaryCase kUnaryCases[] = {
    {UnaryOp::kAbs, abs, [](double x) { return std::abs(x); }},
    {UnaryOp::kExp, exp, [](double x) { return std::exp(x); }},
    {UnaryOp::kLog, log, [](double x) { return std::log(x); }, 1.5f},
    {UnaryOp::kSqrt, sqrt, [](double x) { return std::sqrt(x); }, 1.5f},
    {UnaryOp::kSquare, square, [](double x) { return x * x; }},
    {UnaryOp::kSin, sin, [](double x) { return std::sin(x); }},
    {UnaryOp::kCos, cos, [](double x) { return std::cos(x); }},
    {UnaryOp::kTanh, tanh, [](double x) { return std::tanh(x); }},
    {UnaryOp::kSigmoid, sigmoid, [](double x) { return 1.0 / (1.0 + std::exp(-x)); }},
    {UnaryOp::kSoftplus, softplus, [](double x) { return std::log1p(std::exp(x)); }},
    {UnaryOp::kRelu, relu, [](double x) { return std::max(x, 0.0); }, 0.0f, 1.0f, {0.0}, {0.0}},
    {UnaryOp::kRelu6, relu6, [](double x) { return std::clamp(x, 0.0, 6.0); }, 6.0f, 8.0f, {0.0}, {0.0}},
    {UnaryOp::kSilu, silu, [](double x) { return x / (1.0 + std::exp(-x)); }, 0.0f, 8.0f, {8.0, 8.0}, {16.0, 2.0}},
    // The CPU's approximation of the normal distribution's function is within 1e-7.
    {UnaryOp::kGeluErf,
     [](Tape& tape, Var x) { return gelu(tape, x, GeluKind::kErf); },
     [](double x) { return 0.5 * x * std::erfc(-x / std::numbers::sqrt2); },
     0.0f,
     8.0f,
     {8.0, 8.0},
     {16.0, 2.0}},
    {UnaryOp::kGeluTanh,
     [](Tape& tape, Var x) { return gelu(tape, x, GeluKind::kTanh); },
     [](double x) {
       return x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
     },
     0.0f,
     8.0f,
     {8.0, 8.0},
     {16.0, 2.0}},
};

struct BinaryCase {
  BinaryOp op;
  Var (*function)(Tape&, Var, Var);
  double (*value)(double, double);
  float middle = 0.03f;  // of y: equal to no x of a grid, and no sum of two is 0
  Apart forward = {2.0}, backward = {4.0};
};
inline const BinaryCase kBinaryCases[] = {
    {BinaryOp::kSub, sub, [](double x, double y) { return x - y; }},
    {BinaryOp::kMul, mul, [](double x, double y) { return x * y; }},
    {BinaryOp::kDiv, div, [](double x, double y) { return x / y; }, 2.0f},
    {BinaryOp::kMin, minimum, [](double x, double y) { return std::min(x, y); }},
    {BinaryOp::kMax, maximum, [](double x, double y) { return std::max(x, y); }},
    {BinaryOp::kAdd, add, [](double x, double y) { return x + y; }, 0.03f, {0.0}, {0.0}},
    {BinaryOp::kAddRelu, add_relu, [](double x, double y) { return std::max(x + y, 0.0); }, 0.03f, {0.0}, {0.0}},
};

/// Calls body(row, its rule, its name) for each.
template <class Cases, class Body>
void for_cases(const Cases& cases, const Body& body) {
  for (const auto& each : cases)
    with_rule(each.op, [&]<class Rule>(Rule rule, const OpNames& names) {
      SCOPED_TRACE(names.function);
      body(each, rule, names.function);
    });
}

/// `host`'s first numbers are replaced by infinities, zeros and NaN, in every third place from `first` on.
inline const Tensor& with_odd_ones(const Tensor& host, std::int64_t first = 1) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const float odd[] = {nan, infinity, -infinity, 0.0f, -0.0f, 90.0f};
  for (std::int64_t i = 0; i < 6 && 3 * i + first < host.count(); ++i) host.f32()[3 * i + first] = odd[i];
  return host;
}

}  // namespace lockstep::nn::testing
