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
/// A rule with norms moves a parameter by a factor that depends on two norms of it as a whole. It has, too,
///   kNorms    true
///   prepare(control, g, p, first, second), which may move moments, and says of which two numbers of each element the
///             norms are
///   factor(x, y) of the sums of squares of those,
/// and its operator()(control, factor, g, p, first, second) comes after prepare() of all elements.
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
  enum Rate : std::size_t { kRate, kMomentum };  // lr; as it is
  float weight_decay = 0;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = control[kMomentum] * first + d;
    p -= control[kRate] * first;
  }
};

/// With Nesterov's momentum: d and m the same; p −= lr · (d + momentum·m).
struct SgdNesterovRule {
  static constexpr const char* kName = "SGD with Nesterov's momentum";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t { kRate, kMomentum };  // lr; as it is
  float weight_decay = 0;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = control[kMomentum] * first + d;
    p -= control[kRate] * (d + control[kMomentum] * first);
  }
};

/// PyTorch's AdamW: p −= lr·weight_decay·p; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
/// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
struct AdamWRule {
  static constexpr const char* kName = "AdamW";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t {
    kRate,         // lr / (1 − β₁ᵗ)
    kBeta1,        // β₁
    kRest1,        // 1 − β₁, from f64: it must not suffer from β₁'s rounding to f32
    kSecondScale,  // 1 / sqrt(1 − β₂ᵗ)
    kKeep,         // 1 − lr·weight_decay
  };
  float beta2, rest2, eps;

  static constexpr AdamWRule of(double beta2, double eps) {
    return {static_cast<float>(beta2), static_cast<float>(1.0 - beta2), static_cast<float>(eps)};
  }

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    g *= control[StepControl::kGradientScale];
    first = control[kBeta1] * first + control[kRest1] * g;
    second = beta2 * second + rest2 * g * g;
    p = control[kKeep] * p - control[kRate] * first / (std::sqrt(second) * control[kSecondScale] + eps);
  }
};

/// PyTorch's Adam: d = g + weight_decay·p; m = β₁m + (1−β₁)d; v = β₂v + (1−β₂)d²;
/// p −= lr/(1−β₁ᵗ) · m / (sqrt(v)/sqrt(1−β₂ᵗ) + eps).
struct AdamRule {
  static constexpr const char* kName = "Adam";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t { kRate, kBeta1, kRest1, kSecondScale };  // as AdamW's
  float beta2, rest2, eps, weight_decay;

  static constexpr AdamRule of(double beta2, double eps, double weight_decay) {
    return {static_cast<float>(beta2), static_cast<float>(1.0 - beta2), static_cast<float>(eps),
            static_cast<float>(weight_decay)};
  }

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = control[kBeta1] * first + control[kRest1] * d;
    second = beta2 * second + rest2 * d * d;
    p -= control[kRate] * first / (std::sqrt(second) * control[kSecondScale] + eps);
  }
};

/// PyTorch's NAdam (Dozat, "Incorporating Nesterov Momentum into Adam", 2016): d, m and v as Adam's;
/// p −= lr · (1−μₜ)/(1−Πₜ) · d/s + lr · μₜ₊₁/(1−Πₜ₊₁) · m/s, where s = sqrt(v)/sqrt(1−β₂ᵗ) + eps and RateCorrection has
/// μ and Π.
struct NadamRule {
  static constexpr const char* kName = "NAdam";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t {
    kGradientRate,  // lr · (1−μₜ)/(1−Πₜ)
    kMomentRate,    // lr · μₜ₊₁/(1−Πₜ₊₁)
    kSecondScale,   // 1 / sqrt(1 − β₂ᵗ)
  };
  float beta1, rest1, beta2, rest2, eps, weight_decay;

  static constexpr NadamRule of(double beta1, double beta2, double eps, double weight_decay) {
    return {static_cast<float>(beta1),       static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
            static_cast<float>(1.0 - beta2), static_cast<float>(eps),         static_cast<float>(weight_decay)};
  }

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first = beta1 * first + rest1 * d;
    second = beta2 * second + rest2 * d * d;
    p -=
        (control[kGradientRate] * d + control[kMomentRate] * first) / (std::sqrt(second) * control[kSecondScale] + eps);
  }
};

/// No optimizer's: p = keep·p + add·g. Of moving averages, and of polynomials of matrices.
struct BlendRule {
  static constexpr const char* kName = "blend";
  static constexpr int kMoments = 0;
  float keep, add;

  /// p follows g, of which it is the moving average.
  static constexpr BlendRule average(double decay) {
    return {static_cast<float>(decay), static_cast<float>(1.0 - decay)};
  }

  constexpr void operator()(const float*, float g, float& p, float&, float&) const { p = keep * p + add * g; }
};

/// Of one element: the numbers whose norms a rule wants.
struct NormedPair {
  float x = 0, y = 0;
};

/// LAMB (You et al., 2020), as apex's FusedLAMB and timm's Lamb have it: m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
/// u = m/(1−β₁ᵗ) / (sqrt(v)/sqrt(1−β₂ᵗ) + eps) + weight_decay·p; p −= lr · ‖p‖/‖u‖ · u, with 1 for the ratio where a
/// norm is 0, or where it does not adapt.
struct LambRule {
  static constexpr const char* kName = "LAMB";
  static constexpr int kMoments = 2;
  static constexpr bool kNorms = true;
  enum Rate : std::size_t {
    kRate,         // lr
    kFirstScale,   // 1 / (1 − β₁ᵗ)
    kSecondScale,  // 1 / sqrt(1 − β₂ᵗ)
  };
  float beta1, rest1, beta2, rest2, eps, weight_decay;
  bool adapts;

  static constexpr LambRule of(double beta1, double beta2, double eps, double weight_decay, bool adapts) {
    return {static_cast<float>(beta1),
            static_cast<float>(1.0 - beta1),
            static_cast<float>(beta2),
            static_cast<float>(1.0 - beta2),
            static_cast<float>(eps),
            static_cast<float>(weight_decay),
            adapts};
  }

  constexpr float step_of(const float* control, float p, float first, float second) const {
    return first * control[kFirstScale] / (std::sqrt(second) * control[kSecondScale] + eps) + weight_decay * p;
  }
  constexpr NormedPair prepare(const float* control, float g, float p, float& first, float& second) const {
    g *= control[StepControl::kGradientScale];
    first = beta1 * first + rest1 * g;
    second = beta2 * second + rest2 * g * g;
    return {p, step_of(control, p, first, second)};
  }
  constexpr float factor(double p_squares, double step_squares) const {
    if (!adapts || !(p_squares > 0.0) || !(step_squares > 0.0)) return 1.0f;
    return static_cast<float>(std::sqrt(p_squares) / std::sqrt(step_squares));
  }
  constexpr void operator()(const float* control, float factor, float, float& p, float& first, float& second) const {
    p -= control[kRate] * factor * step_of(control, p, first, second);
  }
};

/// LARS (You et al., 2017), as timm's Lars has it: d = r · (g + weight_decay·p), where
/// r = trust·‖p‖ / (‖g‖ + weight_decay·‖p‖ + eps), or 1 where a norm is 0 or where it does not adapt; p −= lr · d.
struct LarsRule {
  static constexpr const char* kName = "LARS";
  static constexpr int kMoments = 0;
  static constexpr bool kNorms = true;
  enum Rate : std::size_t { kRate };  // lr
  float trust, eps, weight_decay;
  bool adapts;

  constexpr NormedPair prepare(const float* control, float g, float p, float&, float&) const {
    return {p, control[StepControl::kGradientScale] * g};
  }
  constexpr float factor(double p_squares, double g_squares) const {
    if (!adapts || !(p_squares > 0.0) || !(g_squares > 0.0)) return 1.0f;
    const double p = std::sqrt(p_squares), g = std::sqrt(g_squares);
    return static_cast<float>(static_cast<double>(trust) * p /
                              (g + static_cast<double>(weight_decay) * p + static_cast<double>(eps)));
  }
  constexpr float direction(const float* control, float factor, float g, float p) const {
    return factor * (control[StepControl::kGradientScale] * g + weight_decay * p);
  }
  constexpr void operator()(const float* control, float factor, float g, float& p, float&, float&) const {
    p -= control[kRate] * direction(control, factor, g, p);
  }
};

/// With momentum: d the same; m = momentum·m + d; p −= lr · m.
struct LarsMomentumRule {
  static constexpr const char* kName = "LARS with momentum";
  static constexpr int kMoments = 1;
  static constexpr bool kNorms = true;
  enum Rate : std::size_t { kRate };  // lr
  LarsRule plain;
  float momentum;

  constexpr NormedPair prepare(const float* control, float g, float p, float& first, float& second) const {
    return plain.prepare(control, g, p, first, second);
  }
  constexpr float factor(double p_squares, double g_squares) const { return plain.factor(p_squares, g_squares); }
  constexpr void operator()(const float* control, float factor, float g, float& p, float& first, float&) const {
    first = momentum * first + plain.direction(control, factor, g, p);
    p -= control[kRate] * first;
  }
};

/// PyTorch's RMSprop (Tieleman and Hinton, 2012): d = g + weight_decay·p; v = α v + (1−α) d²; p −= lr · d / (sqrt(v) +
/// eps).
struct RmspropRule {
  static constexpr const char* kName = "RMSprop";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t { kRate };  // lr
  float alpha, rest, eps, weight_decay;

  constexpr float direction(const float* control, float g, float p, float& squares) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    squares = alpha * squares + rest * d * d;
    return d / (std::sqrt(squares) + eps);
  }
  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    p -= control[kRate] * direction(control, g, p, first);
  }
};

/// With momentum: m = momentum·m + d / (sqrt(v) + eps); p −= lr · m.
struct RmspropMomentumRule {
  static constexpr const char* kName = "RMSprop with momentum";
  static constexpr int kMoments = 2;
  enum Rate : std::size_t { kRate };  // lr
  RmspropRule plain;
  float momentum;

  constexpr void operator()(const float* control, float g, float& p, float& first, float& second) const {
    second = momentum * second + plain.direction(control, g, p, first);
    p -= control[kRate] * second;
  }
};

/// PyTorch's Adagrad (Duchi, Hazan and Singer, 2011): d = g + weight_decay·p; s = s + d²; p −= lr · d / (sqrt(s) +
/// eps).
struct AdagradRule {
  static constexpr const char* kName = "Adagrad";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t { kRate };  // lr
  float eps, weight_decay;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    const float d = control[StepControl::kGradientScale] * g + weight_decay * p;
    first += d * d;
    p -= control[kRate] * d / (std::sqrt(first) + eps);
  }
};

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): p −= lr·weight_decay·p;
/// p −= lr · sign(β₁m + (1−β₁)g); m = β₂m + (1−β₂)g.
struct LionRule {
  static constexpr const char* kName = "Lion";
  static constexpr int kMoments = 1;
  enum Rate : std::size_t {
    kRate,  // lr
    kKeep,  // 1 − lr·weight_decay
  };
  float beta1, rest1, beta2, rest2;

  constexpr void operator()(const float* control, float g, float& p, float& first, float&) const {
    g *= control[StepControl::kGradientScale];
    const float c = beta1 * first + rest1 * g;
    // NaN stays: a comparison would hide it.
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;
    first = beta2 * first + rest2 * g;
    p = control[kKeep] * p - control[kRate] * sign;
  }
};

/// Of Muon (Jordan et al., 2024) what comes before and after the second moment is made orthogonal (Note [Matrices]):
/// m = μm + (1−μ)g; o = (1−μ)g + μm, divided by its norm; p −= lr·weight_decay·p; p −= lr · o.
struct MuonRule {
  static constexpr const char* kName = "Muon";
  static constexpr int kMoments = 2;
  static constexpr bool kNorms = true;
  enum Rate : std::size_t {
    kRate,  // lr
    kKeep,  // 1 − lr·weight_decay
  };
  static constexpr double kLeastNorm = 1e-7;
  float momentum, rest;

  constexpr NormedPair prepare(const float* control, float g, float, float& first, float& second) const {
    g *= control[StepControl::kGradientScale];
    first = momentum * first + rest * g;
    second = rest * g + momentum * first;
    return {second, 0};
  }
  constexpr float factor(double squares, double) const {
    const double norm = std::sqrt(squares);
    return static_cast<float>(1.0 / (norm > kLeastNorm ? norm : kLeastNorm));
  }
  constexpr void operator()(const float* control, float, float, float& p, float&, float& second) const {
    p = control[kKeep] * p - control[kRate] * second;
  }
};

/// No optimizer's: p times the factor of another rule.
struct ScaleRule {
  static constexpr const char* kName = "scale";
  static constexpr int kMoments = 0;
  static constexpr bool kNorms = true;

  constexpr NormedPair prepare(const float*, float, float p, float&, float&) const { return {p, 0}; }
  constexpr float factor(double squares, double) const { return static_cast<float>(std::sqrt(squares)); }
  constexpr void operator()(const float*, float factor, float, float& p, float&, float&) const { p *= factor; }
};

/// The optimizers, in the order of help, and the rules that each moves parameters by. nn/optim/NAME.cpp has the family
/// of each, NAME_family().
#define LOCKSTEP_OPTIMIZERS(OPTIMIZER)                      \
  OPTIMIZER(sgd, SgdRule, SgdMomentumRule, SgdNesterovRule) \
  OPTIMIZER(adamw, AdamWRule)                               \
  OPTIMIZER(adam, AdamRule)                                 \
  OPTIMIZER(nadam, NadamRule)                               \
  OPTIMIZER(lamb, LambRule)                                 \
  OPTIMIZER(lars, LarsRule, LarsMomentumRule)               \
  OPTIMIZER(rmsprop, RmspropRule, RmspropMomentumRule)      \
  OPTIMIZER(adagrad, AdagradRule)                           \
  OPTIMIZER(lion, LionRule)                                 \
  OPTIMIZER(muon, MuonRule)

#define LOCKSTEP_RULES_OF(name, ...) __VA_ARGS__,
using UpdateRules = std::variant<LOCKSTEP_OPTIMIZERS(LOCKSTEP_RULES_OF) BlendRule, ScaleRule>;
#undef LOCKSTEP_RULES_OF

template <class Rule>
concept RuleWithNorms = Rule::kNorms;

/// One of them. A class, so that others can speak of it who need not be compiled again for a new one.
struct UpdateRule : UpdateRules {
  using UpdateRules::UpdateRules;
};

/// How many numbers it remembers of an element.
inline int moments_of(const UpdateRule& rule) {
  return std::visit([](const auto& each) { return each.kMoments; }, rule);
}

/// Whether it needs prepare() and factors.
inline bool has_norms(const UpdateRule& rule) {
  return std::visit([]<class Rule>(const Rule&) { return RuleWithNorms<Rule>; }, rule);
}

constexpr bool is_finite(double value) { return value - value == 0.0; }

/// NAdam's μ of step `t`.
constexpr double nadam_momentum(double beta, double decay, double t) {
  return beta * (1.0 - 0.5 * std::pow(RateCorrection::kNadamBase, t * decay));
}

/// The product of those of the steps 1 to `t`, from t alone: a device that counts steps itself holds none. With
/// q = 0.96^decay it is βᵗ · Π (1 − qⁱ/2), whose logarithm is −Σₖ 2⁻ᵏ/k · Σᵢ qᵏⁱ; the inner sums are geometric.
constexpr double nadam_product(double beta, double decay, double t) {
  constexpr int kTerms = 56;                            // as many as f64 has bits, and a few
  constexpr double kLogOfBase = -0.040821994520255166;  // std::log(kNadamBase), no constant to clang
  const double a = -decay * kLogOfBase;
  double logarithm = t * std::log(beta), half = 1.0;
  for (int k = 1; k <= kTerms; ++k) {
    half *= 0.5;
    const double ka = k * a;
    logarithm -= half / k * (ka > 0.0 ? std::exp(-ka) * std::expm1(-ka * t) / std::expm1(-ka) : t);
  }
  return std::exp(logarithm);
}

/// What a rate is divided by in step `t`. `rates`: all, before corrections.
constexpr double divisor_of(const RateCorrection& correction, const double* rates, double t) {
  const double beta = correction.beta_rate < 0 ? correction.beta : rates[correction.beta_rate];
  switch (correction.kind) {
    case RateCorrection::kBias: break;
    case RateCorrection::kRootOfBias: return std::sqrt(1.0 - std::pow(beta, t));
    case RateCorrection::kNadamGradient:
      return (1.0 - nadam_product(beta, correction.decay, t)) / (1.0 - nadam_momentum(beta, correction.decay, t));
    case RateCorrection::kNadamMoment:
      return (1.0 - nadam_product(beta, correction.decay, t + 1.0)) / nadam_momentum(beta, correction.decay, t + 1.0);
  }
  return 1.0 - std::pow(beta, t);
}

/// OptimKernels::compute_scaled_update(), on numbers. What torch.amp.GradScaler does in unscale_() and step(): Σ g² in
/// f64 is finite exactly where all gradients are, which are f32.
constexpr void compute_scaled_control(float loss, double squares, double clip_norm, double t, const double* rates,
                                      const RateCorrections& corrections, float* scaler, float* control) {
  const bool finite = is_finite(squares);
  if (!finite) scaler[ScalerState::kNonFinite] = 1.0f;
  for (std::size_t i = 0; i < StepControl::kRates; ++i)
    control[i] = static_cast<float>(rates[i] / divisor_of(corrections.of[i], rates, t));
  const double scale = static_cast<double>(scaler[ScalerState::kScale]);
  const double wanted = clip_norm > 0.0 ? clip_norm / (std::sqrt(squares) / scale + 1e-6) : 1.0;
  control[StepControl::kGradientScale] = static_cast<float>((wanted < 1.0 ? wanted : 1.0) / scale);
  control[StepControl::kApply] = finite && is_finite(static_cast<double>(loss)) ? 1.0f : 0.0f;
}

/// How a GradScaler's scale moves, as torch.amp.GradScaler's does: after `interval` good steps it grows, unless that
/// is infinite, and after one whose gradients are not finite it falls.
struct LossScaleRule {
  float growth = 2, backoff = 0.5f;
  float interval = 2000;
  bool dynamic = true;  // false: it stays

  /// A scale does not fall below: gradients of a scale of 0 would be 0, or NaN.
  static constexpr float kLeast = 0x1p-100f;

  constexpr void operator()(float* state) const {
    const bool skipped = state[ScalerState::kNonFinite] != 0.0f;
    const float scale = state[ScalerState::kScale];
    state[ScalerState::kNonFinite] = 0.0f;
    state[ScalerState::kLastScale] = scale;
    if (skipped) state[ScalerState::kSkippedSteps] += 1.0f;
    const float good = skipped ? 0.0f : state[ScalerState::kGoodSteps] + 1.0f;
    state[ScalerState::kGoodSteps] = good;
    if (!dynamic || (!skipped && good < interval)) return;
    const float next = scale * (skipped ? backoff : growth);
    if (is_finite(static_cast<double>(next))) state[ScalerState::kScale] = next < kLeast ? kLeast : next;
    state[ScalerState::kGoodSteps] = 0.0f;
  }
};

}  // namespace lockstep::nn
