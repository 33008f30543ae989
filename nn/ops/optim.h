// Parameter updates over flat arrays.
#pragma once

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

struct SgdStep {
  float lr = 0, momentum = 0, weight_decay = 0;
  bool nesterov = false;
  float gradient_scale = 1;  // applied to the gradient first (clipping)
};

struct AdamWStep {
  // In f64, because 1 − β must not suffer from β's rounding to f32.
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double bias_correction1 = 1, bias_correction2 = 1;  // 1 − βᵗ
  double gradient_scale = 1;
};

/// f32, all arrays of one length.
class OptimKernels {
 public:
  virtual ~OptimKernels() = default;
  /// PyTorch's SGD: d = g + weight_decay·p; m = momentum·m + d; p −= lr · (nesterov ? d + momentum·m : m).
  /// Without momentum, m is undefined and p −= lr·d.
  virtual void sgd(const SgdStep& step, const Tensor& g, const Tensor& m, const Tensor& p) = 0;
  /// PyTorch's AdamW: p −= lr·weight_decay·p; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
  /// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
  virtual void adamw(const AdamWStep& step, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor& p) = 0;
  /// Σ g², accumulated in f64 in a fixed order.
  virtual double sum_of_squares(const Tensor& g) = 0;
};

}  // namespace lockstep::nn
