#include "trainer/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/stop.h"
#include "trainer/forward.h"

namespace lockstep::trainer {

TrainingStep::TrainingStep(nn::Backend& backend, nn::Module& module, Replica& replica,
                           std::unique_ptr<nn::Optimizer> optimizer, SampleFormat format, const Options& options)
    : backend_(backend),
      module_(module),
      replica_(replica),
      optimizer_(std::move(optimizer)),
      format_(std::move(format)),
      options_(options),
      tape_(backend),
      recorded_(backend, replica, module, options.activations),
      squares_(backend.empty({}, DType::kF64)),
      all_(replica.parameters().size()),
      totals_(backend, Replica::kTotalsBytes),
      squares_of_steps_(backend, sizeof(double)) {
  std::iota(all_.begin(), all_.end(), std::size_t{0});
  begun_.reserve(static_cast<std::size_t>(backend.steps_ahead()) + 1);
  tape_.set_activations(options.activations);
  if (options_.dropout) {
    dropout_state_ = backend.empty({3}, DType::kI64);
    tape_.set_dropout_state(dropout_state_);
  }
  if (options_.trace == nullptr) return;
  layers_ = std::make_unique<LayerTrace>(*options_.trace, module_);
  tape_.set_observer(layers_.get());
}

void TrainingStep::run(std::int64_t step, const data::Batch& batch, double lr) {
  const TraceSpan span(options_.trace, Trace::kSteps, "step");
  optimizer_->begin_step(lr);
  write_dropout_state(step, batch.plan, {.begin = 0, .count = batch.plan.local_count});
  Clock::duration waited{};
  if (!run_recorded(step, batch)) {
    compute(step, with_activations(backend_, inputs_, options_.activations), batch.plan);
    waited = replica_.reducer().waited();
    if (options_.trace != nullptr) options_.trace->buckets(replica_.reducer().timeline());
  }
  if (!options_.keep_inputs) inputs_ = {};
  totals_.add(replica_.totals());
  if (wants_norm()) squares_of_steps_.add(squares_);
  begun_.push_back({step, waited});
}

TrainingStep::Outcome TrainingStep::take_outcome() {
  const auto look_around = [this] {
    replica_.reducer().poll();
    throw_if_stopped("training");
  };
  Outcome outcome;
  outcome.totals = Replica::Totals::from(totals_.take(look_around));
  if (wants_norm()) {
    double squares = 0;
    std::memcpy(&squares, squares_of_steps_.take(look_around).data(), sizeof squares);
    outcome.grad_norm = std::sqrt(squares);
  }
  if (outcome.totals.unused > 0) replica_.refuse_unused();
  outcome.step = begun_.front().step;
  outcome.waited = begun_.front().waited;
  begun_.erase(begun_.begin());
  return outcome;
}

bool TrainingStep::run_recorded(std::int64_t step, const data::Batch& batch) {
  if (!batch.empty() && !inputs_.x.defined()) inputs_ = inputs_of(backend_, batch, format_);
  if (!options_.record || options_.trace != nullptr) return false;
  if (options_.accumulate > 1 && dropout_state_.defined()) return false;  // what is dropped changes from part to part
  return recorded_.run(step, {.global_count = batch.plan.global_count, .variant = variant_}, inputs_,
                       [&](const Inputs& inputs) { compute(step, inputs, batch.plan); });
}

void TrainingStep::write_dropout_state(std::int64_t step, const sampler::StepPlan& plan, const sampler::Slice& part) {
  if (!dropout_state_.defined()) return;
  const nn::DropoutState state = {
      .seed = static_cast<std::int64_t>(options_.seed),
      .step = step,
      .first_sample = static_cast<std::int64_t>(plan.local_begin - plan.global_begin + part.begin)};
  backend_.write(std::as_bytes(std::span(&state, 1)), dropout_state_);
}

void TrainingStep::compute(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan) {
  tape_.reset();  // a recording that was refused has left something there
  replica_.begin_step(step);
  const auto most = static_cast<std::uint64_t>(options_.accumulate);
  const std::uint64_t parts = options_.in_step ? most : std::min(most, plan.local_count);
  if (parts == 0) replica_.contribute_nothing();
  for (std::uint64_t p = 0; p < parts; ++p)
    compute_part(step, inputs, plan, sampler::slice_of(plan.local_count, p, parts), p + 1 == parts);
  update();
  tape_.reset();
}

void TrainingStep::compute_part(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan,
                                const sampler::Slice& part, bool last) {
  tape_.reset();
  if (part.count < plan.local_count) write_dropout_state(step, plan, part);
  const float labels = static_cast<float>(plan.global_count) * static_cast<float>(format_.labels);
  const nn::Loss loss = forward(tape_, module_, rows_of(inputs, part), 1.0f / labels);
  replica_.backward(tape_, loss, static_cast<std::int64_t>(part.count), last);
}

Inputs TrainingStep::rows_of(const Inputs& inputs, const sampler::Slice& part) {
  if (!inputs.x.defined()) return no_inputs(backend_, format_, options_.activations);
  const auto begin = static_cast<std::int64_t>(part.begin), end = static_cast<std::int64_t>(part.begin + part.count);
  return {.x = inputs.x.slice(begin, end), .labels = inputs.labels.slice(begin, end)};
}

// Moves the parameters: each bucket's as soon as its sums are there, or, with clipping, all at the end. Whether they
// move at all the device decides, which knows the loss first.
void TrainingStep::update() {
  if (wants_norm()) backend_.pointwise().fill(nn::Tensor::view_of(squares_.raw(), {2}), 0.0f);  // an f64 of zero bits
  bool first = true;
  auto waiting_since = options_.trace != nullptr ? Clock::now() : Clock::time_point{};
  replica_.finish([&](std::span<const std::size_t> slots) {
    if (options_.trace != nullptr)
      options_.trace->span(Trace::kComputation, "wait for bucket", waiting_since, Clock::now());
    if (std::exchange(first, false) && options_.clip_norm == 0)
      optimizer_->compute_update_scale(replica_.totals(), {}, 0);
    update_bucket(slots);
    if (options_.trace != nullptr) waiting_since = Clock::now();
  });
  if (options_.clip_norm == 0) return;
  const TraceSpan span(options_.trace, Trace::kComputation, "optimizer");
  optimizer_->compute_update_scale(replica_.totals(), squares_, options_.clip_norm);
  optimizer_->update(all_);
}

void TrainingStep::update_bucket(std::span<const std::size_t> slots) {
  const bool clip = options_.clip_norm > 0;
  const TraceSpan span(options_.trace, Trace::kComputation, clip ? "gradient norm" : "optimizer");
  if (wants_norm()) optimizer_->add_squares(slots, squares_);
  if (!clip) optimizer_->update(slots);
}

}  // namespace lockstep::trainer
