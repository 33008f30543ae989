// Parameter updates, many parameters at once.
#pragma once

#include <cstddef>
#include <span>

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// One parameter and what moves it: arrays of `count` elements on the device.
struct UpdateArrays {
  std::int64_t count = 0;
  const float* gradient = nullptr;
  float* parameter = nullptr;
  float* first = nullptr;    // SGD's momentum, AdamW's m; nullptr: none
  float* second = nullptr;   // AdamW's v
  BFloat16* copy = nullptr;  // also receives the parameter, rounded; nullptr: nobody wants it
};

/// What differs from one step's updates to the next: f32 in device memory, so that a step whose kernels have been
/// recorded can be run again with other values.
struct StepControl {
  enum Place : std::size_t {
    kRate,                    // SGD: lr. AdamW: lr / (1 − β₁ᵗ)
    kDecay,                   // AdamW: 1 − lr·weight_decay, what a parameter is multiplied with first
    kSecondScale,             // AdamW: 1 / sqrt(1 − β₂ᵗ)
    kRates,                   // how many of them the host writes before each step
    kGradientScale = kRates,  // multiplies every gradient first
    kApply,                   // 0: nothing moves
    kSize
  };
};

struct SgdConstants {
  float momentum = 0, weight_decay = 0;
  bool nesterov = false;
};

struct AdamWConstants {
  // In f64, because 1 − β must not suffer from β's rounding to f32.
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};

/// f32. `control` is (StepControl::kSize) f32.
class OptimKernels {
 public:
  virtual ~OptimKernels() = default;
  /// PyTorch's SGD, with g = gradient · scale: d = g + weight_decay·p; m = momentum·m + d;
  /// p −= lr · (nesterov ? d + momentum·m : m). Without momentum, `first` is nullptr and p −= lr·d.
  virtual void sgd(const SgdConstants& constants, const Tensor& control, std::span<const UpdateArrays> all) = 0;
  /// PyTorch's AdamW: p −= lr·weight_decay·p; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
  /// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
  virtual void adamw(const AdamWConstants& constants, const Tensor& control, std::span<const UpdateArrays> all) = 0;
  /// squares (1) f64 += Σ g² over all gradients, accumulated in f64 in an order that depends on their sizes alone.
  virtual void add_squares(std::span<const UpdateArrays> all, const Tensor& squares) = 0;
  /// Whether and how far this step goes: kApply = 1 where `loss`, whose first element is the summed loss (f32), is
  /// finite, else 0. kGradientScale = min(1, clip_norm / (sqrt(squares) + 1e-6)) as torch.nn.utils.clip_grad_norm_ has
  /// it, or 1 where clip_norm is 0. `squares` (1) f64, undefined where clip_norm is 0.
  virtual void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                                    const Tensor& control) = 0;
};

}  // namespace lockstep::nn
