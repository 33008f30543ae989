// An exponential moving average of a model's parameters.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::nn {

/// average = decay · average + (1 − decay) · parameter after each step, which begins with the parameters' values:
/// timm's ModelEmaV2, and torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay), which begins with those
/// after its first step. Buffers are not averaged: running statistics are means already, and the model's belong to
/// either.
///
///   nn::MovingAverage average(model.named_parameters(), 0.999);
///   for (…) {
///     …
///     optimizer->step(lr);
///     average.update();
///   }
///   const auto in_place = average.in_place();  // while it lives, the model has the average's values
///   evaluate(model);
///
/// f32, on the parameters' device. The parameters must outlive its use, else it is a UsageError, and their backend the
/// average; they are not resized. One thread uses it. The average of ranks that have the same parameters has the same
/// bits.
class MovingAverage final {
 public:
  /// Throws UsageError for a decay that does not lie between 0 and 1, and for parameters that an Optimizer refuses.
  MovingAverage(std::vector<NamedParameter> parameters, double decay);
  ~MovingAverage();
  MovingAverage(const MovingAverage&) = delete;
  MovingAverage& operator=(const MovingAverage&) = delete;

  /// After a step.
  void update();
  /// The same unless the step was skipped: `control` is its optimizer's (Optimizer::control()).
  void update(const Tensor& control);
  /// By parameter, with the parameters' names: what a run resumes from. The tensors share its memory.
  const std::vector<NamedMoment>& values() const;

  /// The parameters have the average's values, to the bit, and the average theirs, until it ends. Not during a pass,
  /// update() or another one. The average must outlive it.
  class [[nodiscard]] InPlace {
   public:
    explicit InPlace(MovingAverage& average) : average_(average) { average_.exchange(); }
    ~InPlace();
    InPlace(const InPlace&) = delete;
    InPlace& operator=(const InPlace&) = delete;

   private:
    MovingAverage& average_;
  };
  InPlace in_place() { return InPlace(*this); }

 private:
  void check_there() const;
  void exchange();

  std::unique_ptr<const UpdateRule> rule_;
  Backend* backend_ = nullptr;  // nullptr: there are no parameters
  std::vector<NamedMoment> values_;
  std::vector<Lifetime::Ref> lifetimes_;  // by parameter
  Tensor control_, held_;                 // held_: of the largest parameter's size
  std::vector<UpdateArrays> arrays_;
};

}  // namespace lockstep::nn
