// What custom losses are put together from: functions of each element, and sums. f32.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

enum class UnaryOp : std::uint8_t {
  kAbs,
  kExp,
  kLog,
  kSqrt,
  kSquare,
  kSin,
  kCos,
  kTanh,
  kSigmoid,   // 1 / (1 + e⁻ˣ)
  kSoftplus,  // log(1 + eˣ)
};

enum class BinaryOp : std::uint8_t { kSub, kMul, kDiv, kMin, kMax };

/// All operands are f32 and contiguous, and of one number of elements unless said otherwise. NaN stays NaN.
class ElementwiseKernels {
 public:
  virtual ~ElementwiseKernels() = default;
  virtual void unary(UnaryOp op, const Tensor& x, const Tensor& y) = 0;
  /// dx = dy · op'(x), where y is op(x); dx may be dy. At 0 the slope of kAbs is 0.
  virtual void unary_backward(UnaryOp op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) = 0;
  virtual void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) = 0;
  /// dx and dy, each left out where it is undefined, from z's gradient. Where x and y are equal, each gets half of
  /// that of kMin and kMax.
  virtual void binary_backward(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& dz, const Tensor& dx,
                               const Tensor& dy) = 0;
  /// y = scale · x + shift; y may be x.
  virtual void affine(const Tensor& x, float scale, float shift, const Tensor& y) = 0;
  /// y (M): the sums of the rows of x (M, C).
  virtual void sum_rows(const Tensor& x, const Tensor& y) = 0;
  /// y (M, C): each row is filled with an element of x (M).
  virtual void broadcast_rows(const Tensor& x, const Tensor& y) = 0;
  /// totals (2) receives the sum of all elements of x, added up in f64, and NaN: nothing is counted.
  virtual void total(const Tensor& x, const Tensor& totals) = 0;
};

}  // namespace lockstep::nn
