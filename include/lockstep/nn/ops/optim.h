// Parameter updates, many parameters at once.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

/// One parameter and what moves it: arrays of `count` elements on the device.
struct UpdateArrays {
  std::int64_t count = 0;
  const float* gradient = nullptr;
  float* parameter = nullptr;
  float* first = nullptr;  // moments, as many as the rule has
  float* second = nullptr;
  BFloat16* copy = nullptr;  // also receives the parameter, rounded; nullptr: nobody wants it
};

/// What differs from one step's updates to the next: f32 in device memory, so that a step whose kernels have been
/// recorded can be run again with other values.
struct StepControl {
  enum Place : std::size_t {
    kRates = 3,               // the first so many are what the host writes before each step, as the rule says
    kGradientScale = kRates,  // multiplies every gradient first
    kApply,                   // 0: nothing moves
    kSize
  };
};

struct UpdateRule;  // nn/ops/update_rules.h

/// All f32. `control` is (StepControl::kSize).
class OptimKernels {
 public:
  virtual ~OptimKernels() = default;
  /// Moves all of them as `rule` says (Note [Update rules]), each with as many moments as that has.
  virtual void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) = 0;
  /// squares (1) f64 += Σ g² over all gradients, accumulated in f64 in an order that depends on their sizes alone.
  virtual void add_squares(std::span<const UpdateArrays> all, const Tensor& squares) = 0;
  /// Whether and how far this step goes: kApply = 1 where `loss`, whose first element is the summed loss (f32), is
  /// finite, and so is the norm if it clips, else 0. kGradientScale = min(1, clip_norm / (sqrt(squares) + 1e-6)) as
  /// torch.nn.utils.clip_grad_norm_ has it, or 1 where clip_norm is 0. `squares` (1) f64, undefined where clip_norm is
  /// 0.
  virtual void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                                    const Tensor& control) = 0;
};

}  // namespace lockstep::nn
