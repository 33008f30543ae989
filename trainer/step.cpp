#include "trainer/step.h"

#include <algorithm>
#include <cmath>

#include "trainer/forward.h"

namespace lockstep::trainer {

TrainingStep::TrainingStep(nn::Backend& backend, nn::Module& module, Replica& replica,
                           std::unique_ptr<nn::Optimizer> optimizer, std::vector<std::int64_t> sample_dims,
                           const Options& options)
    : backend_(backend),
      module_(module),
      replica_(replica),
      optimizer_(std::move(optimizer)),
      sample_dims_(std::move(sample_dims)),
      options_(options),
      tape_(backend) {
  if (options_.trace == nullptr) return;
  layers_ = std::make_unique<LayerTrace>(*options_.trace, module_);
  tape_.set_observer(layers_.get());
}

TrainingStep::Outcome TrainingStep::run(std::int64_t step, const data::Batch& batch, double lr) {
  const TraceSpan span(options_.trace, Trace::kSteps, "step");
  replica_.begin_step(step);
  if (batch.empty())
    replica_.contribute_nothing();
  else
    forward_and_backward(batch);
  Outcome outcome;
  update(lr, outcome);
  tape_.reset();
  outcome.waited = replica_.reducer().waited();
  if (options_.trace != nullptr) options_.trace->buckets(replica_.reducer().timeline());
  return outcome;
}

void TrainingStep::forward_and_backward(const data::Batch& batch) {
  const nn::Loss loss =
      forward(backend_, tape_, module_, batch, sample_dims_, 1.0f / static_cast<float>(batch.plan.global_count));
  replica_.backward(tape_, loss, static_cast<std::int64_t>(batch.plan.local_count));
}

// Waits for the sums and moves the parameters: each bucket's as soon as it is there, or, with clipping, all at the end.
void TrainingStep::update(double lr, Outcome& outcome) {
  const bool clip = options_.clip_norm > 0;
  double squares = 0.0;
  bool finite = true;
  auto waiting_since = options_.trace != nullptr ? Clock::now() : Clock::time_point{};
  replica_.finish(
      [&](const Replica::Totals& totals) {
        outcome.totals = totals;
        finite = std::isfinite(totals.loss);
        if (finite && !clip) optimizer_->begin_step(lr);
      },
      [&](std::span<const std::size_t> slots) {
        if (options_.trace != nullptr)
          options_.trace->span(Trace::kComputation, "wait for bucket", waiting_since, Clock::now());
        update_bucket(slots, finite, squares);
        if (options_.trace != nullptr) waiting_since = Clock::now();
      });
  outcome.grad_norm = std::sqrt(squares);
  if (!clip || !finite) return;
  const TraceSpan span(options_.trace, Trace::kComputation, "optimizer");
  // As torch.nn.utils.clip_grad_norm_: scale by max_norm / (norm + 1e-6) where that is below one.
  optimizer_->begin_step(lr, std::min(1.0, options_.clip_norm / (outcome.grad_norm + 1e-6)));
  for (std::size_t index = 0; index < replica_.parameters().size(); ++index) optimizer_->update(index);
}

void TrainingStep::update_bucket(std::span<const std::size_t> slots, bool finite, double& squares) {
  if (!finite) return;
  const bool clip = options_.clip_norm > 0;
  const TraceSpan span(options_.trace, Trace::kComputation, clip ? "gradient norm" : "optimizer");
  for (const std::size_t slot : slots) {
    if (clip || options_.want_norm)
      squares += backend_.optim().sum_of_squares(replica_.parameters()[slot].parameter->gradient());
    if (!clip) optimizer_->update(slot);
  }
}

}  // namespace lockstep::trainer
