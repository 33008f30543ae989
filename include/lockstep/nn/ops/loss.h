// Losses: summed over the local samples, scaled by the caller (1 / global count). Logits and their gradient may have a
// pitch, of a device whose Backend::pitch_of() asks for one.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Scale of a loss's gradient, but not of its sum: `constant`, times `factor` if that is defined: (1) f32 on the
/// device, read when the kernel runs.
struct LossScale {
  LossScale(float by) : constant(by) {}  // NOLINT(google-explicit-constructor): most have nothing else
  LossScale(float by, Tensor times) : constant(by), factor(std::move(times)) {}

  /// On the device, of `factor`; nullptr: 1.
  const float* times() const { return factor.defined() ? factor.f32() : nullptr; }

  float constant;
  Tensor factor;
};

/// What a cross entropy makes of its targets.
struct TargetRule {
  TargetRule(float by) : smoothing(by) {}  // NOLINT(google-explicit-constructor): most have nothing else
  TargetRule(float by, std::optional<std::int32_t> none, Tensor of_classes = {})
      : smoothing(by), ignored(none), weights(std::move(of_classes)) {}

  float smoothing;                           // in [0, 1)
  std::optional<std::int32_t> ignored = {};  // rows of this label count for nothing: PyTorch's ignore_index
  Tensor weights = {};                       // (K) f32 on the device: how much each class counts; undefined: 1 each
};

class LossKernels {
 public:
  virtual ~LossKernels() = default;
  /// Softmax cross entropy with labels smoothed by ε = rule.smoothing: PyTorch's CrossEntropyLoss. A row's loss
  /// is Σⱼ −qⱼ log softmax(logits)ⱼ with qⱼ = wⱼ ε/K, and wⱼ (1 − ε) more for the label (Szegedy et al., "Rethinking
  /// the Inception Architecture for Computer Vision", 2016), where w is rule.weights. logits (N, K) f32, bf16 or f16,
  /// labels (N) i32, each in [0, K): else UsageError, or, on a device that cannot throw, a loss that is NaN. totals (2)
  /// f32 receives the rows' sum and the number of samples whose largest logit is the label's (ties: the first class).
  /// dlogits (N, K), of the logits' type, if defined, receives (Σ q · softmax − q) · scale, and zeros between its rows
  /// if that is nobody's; it may be the logits. Without weights Σ q = 1. Rows labelled rule.ignored, which may be no
  /// class, have a loss and a gradient of 0, and are not counted.
  virtual void cross_entropy(const Tensor& logits, const Tensor& labels, const LossScale& scale, const TargetRule& rule,
                             const Tensor& totals, const Tensor& dlogits) {}
  /// The same with probabilities p (N, K) f32 in place of labels: qⱼ = wⱼ ((1 − ε) pⱼ + ε/K). Counted are rows whose
  /// largest logit is of the largest probability's class (ties: the first of both). Without rule.ignored.
  virtual void soft_cross_entropy(const Tensor& logits, const Tensor& probabilities, const LossScale& scale,
                                  const TargetRule& rule, const Tensor& totals, const Tensor& dlogits) {}
  /// total () f32: in how many rows of logits (N, K) fewer than k others come before the label's: larger ones, and
  /// equal ones of lower classes. A label that is no class or the ignored one, or whose logit is NaN, counts for
  /// nothing.
  virtual void count_in_top(const Tensor& logits, const Tensor& labels, std::int64_t k, const Tensor& total,
                            std::optional<std::int32_t> ignored = {}) {}
  /// totals (2) receives the sum of all elements of x (f32), added up in f64, and NaN: nothing is counted.
  virtual void total(const Tensor& x, const Tensor& totals) {}
  /// Squared error. x, target (any shape) f32. totals (2) receives the sum of (x − target)² and 0. dx, if defined,
  /// receives 2 (x − target) · scale.
  virtual void squared_error(const Tensor& x, const Tensor& target, const LossScale& scale, const Tensor& totals,
                             const Tensor& dx) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
