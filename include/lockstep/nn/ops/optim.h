// Parameter updates, many parameters at once.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Note [Norm blocks]
/// Norms (of all gradients, for clipping; of a parameter and of its update, for LAMB and LARS) are summed in f64 over
/// blocks of kNormBlock elements of a parameter, counted from its first one, and the sums of the blocks in their order.
/// A block has the same bits whoever computes it, on however many threads and wherever the gradient lies. So a norm
/// does not depend on buckets, on shards, or on which rank has which blocks of a parameter (ZeRO).
inline constexpr std::int64_t kNormBlock = 2048;
constexpr std::int64_t norm_blocks(std::int64_t count) { return (count + kNormBlock - 1) / kNormBlock; }

/// Where numbers are kept a second time, rounded to 16 bits, on the device. Owns nothing.
struct HalfCopy {
  void* data = nullptr;        // nullptr: nobody wants it
  DType dtype = DType::kBF16;  // or kF16

  explicit operator bool() const { return data != nullptr; }
  HalfCopy operator+(std::int64_t elements) const { return {static_cast<std::uint16_t*>(data) + elements, dtype}; }
  bool operator==(const HalfCopy&) const = default;
};

/// One parameter, or whole blocks of one (Note [Norm blocks]), and what moves it: arrays of `count` elements on the
/// device, of whoever calls, who keeps them until the device is done.
struct UpdateArrays {
  std::int64_t count = 0;
  const float* gradient = nullptr;
  float* parameter = nullptr;
  float* first = nullptr;  // moments, as many as the rule has
  float* second = nullptr;
  HalfCopy copy = {};      // also receives the parameter, rounded
  double* sums = nullptr;  // of its blocks: one number each of squares(), two each of prepare()
};

/// What differs from one step's updates to the next: f32 in device memory, so that a step whose kernels have been
/// recorded can be run again with other values.
struct StepControl {
  enum Place : std::size_t {
    kRates = 5,               // the first so many are what the host writes before each step, as the rule says
    kGradientScale = kRates,  // multiplies every gradient first
    kApply,                   // 0: nothing moves
    kSize
  };
};

/// What a GradScaler knows, f32 in device memory. Counts are exact up to 2²⁴.
struct ScalerState {
  enum Place : std::size_t {
    kScale,         // of losses, from the next forward on
    kGoodSteps,     // in a row, since the scale has changed
    kSkippedSteps,  // of all
    kNonFinite,     // not 0: gradients of the step under way are not finite
    kLastScale,     // of the last step that update_loss_scale() has ended
    kSize
  };
};

/// What a rate is divided by in step t, from 1.
struct RateCorrection {
  enum Kind : std::uint8_t {
    kBias,        // 1 − betaᵗ
    kRootOfBias,  // the root of that
    kNadamGradient,  // (1 − Πₜ) / (1 − μₜ), where μₜ = beta · (1 − 0.96^(t · decay) / 2) and Πₜ = μ₁ · … · μₜ
    kNadamMoment,  // (1 − Πₜ₊₁) / μₜ₊₁
  };
  static constexpr double kNadamBase = 0.96;
  double beta = 0;     // 0: by 1
  int beta_rate = -1;  // the place of the rate that is beta instead; −1: none is
  Kind kind = kBias;
  double decay = 0;  // of NAdam's momentum
};
struct RateCorrections {
  RateCorrection of[StepControl::kRates];
};

/// A step of one group of parameters whose gradients are those of scaled losses.
struct ScaledStep {
  Tensor loss;                  // the first element is the summed loss, f32
  Tensor squares;               // (1) f64: of all gradients as they are, scaled
  double clip_norm = 0;         // of gradients that are not scaled; 0: no clipping
  Tensor steps;                 // (1) i64: how many have moved parameters
  std::int64_t missed = 0;      // of those, steps that do not count for these parameters
  Tensor rates;                 // (StepControl::kRates) f64: before corrections
  RateCorrections corrections;  // of them
};

struct UpdateRule;     // nn/ops/update_rules.h
struct LossScaleRule;  // there too

/// All f32. `control` is (StepControl::kSize). Spans are read during the call.
class OptimKernels {
 public:
  virtual ~OptimKernels() = default;
  /// Moves all of them as `rule` says (Note [Update rules]), each with as many moments as that has. `factors`
  /// (all.size()) is what compute_factors() has found for a rule with norms, undefined for others. `replicas`, on the
  /// CPU alone: for each further copy of the parameters that gets the new values too, how many elements it lies from
  /// UpdateArrays::parameter.
  virtual void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all,
                      const Tensor& factors, std::span<const std::ptrdiff_t> replicas) {}
  void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all, const Tensor& factors) {
    update(rule, control, all, factors, {});
  }
  /// For a rule with norms, before update(): moves what it remembers before the parameter, and sums[2b], sums[2b + 1] =
  /// Σ x², Σ y² over block b of what the rule takes the norms of.
  virtual void prepare(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) {}
  /// factors[i] (f32) = what `rule` makes of the two norms of parameter i, whose `count` and `sums` are those of the
  /// whole parameter.
  virtual void compute_factors(const UpdateRule& rule, std::span<const UpdateArrays> all, const Tensor& factors) {}
  /// sums[b] = Σ g² over block b of each gradient.
  virtual void squares(std::span<const UpdateArrays> all) {}
  /// to (1) f64 = the sum of `parts` (n) f64, in an order that depends on n alone.
  virtual void add_up(const Tensor& parts, const Tensor& to) {}
  /// Whether and how far this step goes: kApply = 1 where `loss`, whose first element is the summed loss (f32), is
  /// finite, and so is the norm if it clips, else 0. kGradientScale = min(1, clip_norm / (sqrt(squares) + 1e-6)) as
  /// torch.nn.utils.clip_grad_norm_ has it, or 1 where clip_norm is 0. `squares` (1) f64, undefined where clip_norm is
  /// 0.
  virtual void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                                    const Tensor& control) {}
  /// The same of a step whose losses have been multiplied by scaler[kScale], `scaler` (ScalerState::kSize): all of
  /// `control`. kApply = 1 where loss and squares are finite. Squares that are not set scaler[kNonFinite]. The rates
  /// are those of step `steps` − missed + 1; kGradientScale divides by the scale, too, and clips the norm that
  /// gradients then have.
  virtual void compute_scaled_update(const ScaledStep& step, const Tensor& scaler, const Tensor& control) {}
  /// steps (1) i64 += 1 where control[kApply] is not 0.
  virtual void count_step(const Tensor& control, const Tensor& steps) {}
  /// Ends a step: moves `scaler` as `rule` says, and clears kNonFinite.
  virtual void update_loss_scale(const LossScaleRule& rule, const Tensor& scaler) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
