// What custom losses are put together from, beside functions of each element: scaling and sums. f32.
#pragma once

#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

/// All operands are f32 and contiguous, and of one number of elements unless said otherwise. NaN stays NaN.
class ElementwiseKernels {
 public:
  virtual ~ElementwiseKernels() = default;
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
