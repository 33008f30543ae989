// The arithmetic of optimizers, once for all devices: how one element of a parameter moves.
#pragma once

#include <cmath>
#include <variant>

#include "lockstep/nn/ops/optim.h"

namespace lockstep::nn {

/// Note [Update rules]
/// A rule is a struct of constants, f32, which an optimizer (nn/optim/) makes and computes the rates for. It has
///   kName     what its kernel is called
///   kMoments  how many numbers it remembers of an element: 0, 1 or 2
///   Rate      places in StepControl of the rates that it reads
///   operator()(control, g, p, first, second), which moves the element p and its moments by the gradient g.
/// The kernels of the CPU and of CUDA are compiled from it, so it uses nothing that only one of them has. Compilers may
/// fuse a product with the sum that it is part of: the same formula written in another way may have other bits.

/// PyTorch's SGD without momentum: p −= lr · (g + weight_decay·p).
struct SgdRule {
  static constexpr const char* kName = "SGD";
  static constexpr int kMoments = 0;
  enum Rate : std::size_t { kRate };  // lr
  float weight_decay = 0;

  constexpr void operator()(const float* control, float g, float& p, float&, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    p -= control[kRate] * d;
  }
};

/// With momentum: d = g + weight_decay·p; m = momentum·m + d; p −= lr · m.
struct SgdMomentumRule {
  static constexpr const char* kName = "SGD with momentum";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t { kRate };  // lr
  float momentum = 0, weight_decay = 0;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = momentum * first + d;
    p -= control[kRate] * first;
  }
};

/// With Nesterov's momentum: d and m the same; p −= lr · (d + momentum·m).
struct SgdNesterovRule {
  static constexpr const char* kName = "SGD with Nesterov's momentum";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t { kRate };  // lr
  float momentum = 0, weight_decay = 0;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = momentum * first + d;
    p -= control[kRate] * (d + momentum * first);
  }
};

/// PyTorch's AdamW: p −= lr·weight_decay·p; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
/// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
struct AdamWRule {
  static constexpr const char* kName = "AdamW";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t {
    kRate,         // lr / (1 − β₁ᵗ)
    kKeep,         // 1 − lr·weight_decay
    kSecondScale,  // 1 / sqrt(1 − β₂ᵗ)
  };
  float beta1, rest1, beta2, rest2, eps;

  /// From f64, because 1 − β must not suffer from β's rounding to f32.
  static constexpr AdamWRule of(double beta1, double beta2, double eps) {
    return {static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
            static_cast<float>(1.0 - beta2), static_cast<float>(eps)};
  }

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    g *= control[StepControl::kGradientScale];
    first = beta1 * first + rest1 * g;
    second = beta2 * second + rest2 * g * g;
    p = control[kKeep] * p - control[kRate] * first / (std::sqrt(second) * control[kSecondScale] + eps);
  }
};

/// PyTorch's Adam: d = g + weight_decay·p; m = β₁m + (1−β₁)d; v = β₂v + (1−β₂)d²;
/// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
struct AdamRule {
  static constexpr const char* kName = "Adam";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t {
    kRate,         // lr / (1 − β₁ᵗ)
    kSecondScale,  // 1 / sqrt(1 − β₂ᵗ)
  };
  float beta1, rest1, beta2, rest2, eps, weight_decay;

  static constexpr AdamRule of(double beta1, double beta2, double eps, double weight_decay) {
    return {static_cast<float>(beta1),       static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
            static_cast<float>(1.0 - beta2), static_cast<float>(eps),         static_cast<float>(weight_decay)};
  }

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = beta1 * first + rest1 * d;
    second = beta2 * second + rest2 * d * d;
    p -= control[kRate] * first / (std::sqrt(second) * control[kSecondScale] + eps);
  }
};

using UpdateRules = std::variant<SgdRule, SgdMomentumRule, SgdNesterovRule, AdamWRule, AdamRule>;

/// One of them. A class, so that others can speak of it who need not be compiled again for a new one.
struct UpdateRule : UpdateRules {
  using UpdateRules::UpdateRules;
};

/// How many numbers it remembers of an element.
inline int moments_of(const UpdateRule& rule) {
  return std::visit([](const auto& each) { return each.kMoments; }, rule);
}

}  // namespace lockstep::nn
