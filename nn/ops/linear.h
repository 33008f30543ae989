// Matrix products of fully connected layers.
#pragma once

#include <cstdint>

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// What a kernel does with its result before it hands it over. ReLU leaves NaN as it is.
enum class Epilogue : std::uint8_t { kNone, kRelu };

/// N samples (0 is allowed), I inputs, O outputs; w is (O, I), b is (O) or undefined (no bias). Activations, w and b
/// are of one type, f32 or, where the backend computes in it, bf16; dw and db are f32 always. Sums are f32.
class LinearKernels {
 public:
  virtual ~LinearKernels() = default;
  /// y (N, O) = epilogue(x (N, I) · wᵀ + b)
  virtual void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) = 0;
  /// dx (N, I) = dy (N, O) · w
  virtual void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) = 0;
  /// dw (O, I) = dyᵀ · x, added to what dw holds when `accumulate`
  virtual void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) = 0;
  /// db (O) = column sums of dy (N, O), added to what db holds when `accumulate`
  virtual void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) = 0;
};

}  // namespace lockstep::nn
