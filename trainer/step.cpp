#include "trainer/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "base/flight_record.h"
#include "base/log.h"
#include "base/signals.h"
#include "trainer/not_finite.h"

namespace lockstep::trainer {
namespace {

using parallel::DistributedDataParallel;

// Places among the scalars that are summed with the gradients.
enum Place : std::int64_t { kLoss, kCorrect, kCount, kStops, kUnused };

constexpr std::int64_t kScalars = DistributedDataParallel::kScalars;
constexpr std::int64_t kScaling = kScalars + static_cast<std::int64_t>(sizeof(double) / sizeof(float));
constexpr std::size_t kNumbers = static_cast<std::size_t>(kScaling) + nn::ScalerState::kSize;

}  // namespace

TrainingStep::TrainingStep(nn::Backend& backend, DistributedDataParallel& ddp, std::shared_ptr<nn::Optimizer> optimizer,
                           SampleFormat format, const Options& options)
    : backend_(backend),
      ddp_(ddp),
      optimizer_(std::move(optimizer)),
      format_(std::move(format)),
      options_(options),
      tape_(backend),
      numbers_(backend.empty({static_cast<std::int64_t>(kNumbers)})),
      squares_(nn::Tensor::view_of(numbers_.data<float>() + kScalars, {}, DType::kF64)),
      scaling_(numbers_.slice(kScaling, static_cast<std::int64_t>(kNumbers))),
      in_flight_(backend, kNumbers * sizeof(float)) {
  summed_.reserve(ddp.parameters().size());
  tape_.set_activations(options.activations);
  if (options.scaler != nullptr) tape_.set_loss_scale(options.scaler->scale());
  optimizer_->set_scaler(options.scaler);
  ask_to_stop(false);
  ddp_.set_bucket_callback([this](std::span<const std::size_t> slots) { update_bucket(slots); });
  if (options_.dropout) {
    dropout_state_ = backend.empty({3}, DType::kI64);
    tape_.set_dropout_state(dropout_state_);
  }
  if (options_.trace == nullptr) return;
  layers_ = std::make_unique<LayerTrace>(*options_.trace, ddp_.module());
  tape_.set_observer(layers_.get());
}

Inputs TrainingStep::upload(const data::Batch& batch) {
  if (options_.ignored) counted_ = counted_targets(batch, options_.ignored);
  return batch.empty() ? Inputs() : inputs_of(backend_, batch, format_);
}

void TrainingStep::run(std::int64_t step, const data::Batch& batch, double lr, std::optional<double> momentum) {
  const TraceSpan span(options_.trace, Trace::kSteps, "step");
  const StepInFlight begun = {.step = step, .plan = batch.plan, .lr = lr, .momentum = momentum, .begin = Clock::now()};
  if (graphs_ != nullptr) graphs_->expect_step(batch.plan.global_count);
  run(begun, upload(batch));
}

void TrainingStep::run(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan, double lr) {
  run({.step = step, .plan = plan, .lr = lr, .begin = Clock::now()}, inputs);
}

// Which labels are ignored each rank knows of its own, and means are over those of all.
double TrainingStep::targets_of(const sampler::StepPlan& plan) {
  if (!options_.ignored) return static_cast<double>(plan.global_count) * static_cast<double>(format_.targets);
  double all = 0;
  for (const std::int64_t counted : ddp_.group().all_gather_numbers(static_cast<std::int64_t>(counted_)))
    all += static_cast<double>(counted);
  return all;
}

void TrainingStep::set_scale(double targets) {
  scale_ = targets > 0 ? options_.loss_scale / static_cast<float>(targets) : 0.0f;
}

void TrainingStep::expect(const data::Batch& batch) {
  if (options_.ignored) counted_ = counted_targets(batch, options_.ignored);
  set_scale(targets_of(batch.plan));
}

void TrainingStep::run(StepInFlight step, const Inputs& inputs) {
  step.targets = targets_of(step.plan);
  step.norm = norm_ = finds_norm(step.step);
  set_scale(step.targets);
  own_finite_ = true;
  optimizer_->begin_step(step.lr, step.momentum);
  ddp_.set_step(step.step);
  if (options_.carried != nullptr && step.plan.global_begin == 0) options_.carried->reset();
  write_dropout_state(backend_, dropout_state_, step.step, step.plan, {.begin = 0, .count = step.plan.local_count});
  if (!run_captured(step.step, inputs, step.plan)) {
    compute(step.step, with_activations(backend_, inputs, options_.activations), step.plan);
    step.waited = ddp_.reducer().waited();
    if (options_.trace != nullptr) options_.trace->buckets(ddp_.reducer().timeline());
  }
  in_flight_.add(step, numbers_);
  if (!choice_reported_ && ddp_.bucket_choice()) {
    choice_reported_ = true;
    if (ddp_.group().rank() == 0) log_info("{}", ddp::describe(*ddp_.bucket_choice()));
  }
}

bool TrainingStep::run_captured(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan) {
  if (graphs_ == nullptr || options_.trace != nullptr) return false;
  if (options_.accumulate > 1 && dropout_state_.defined()) return false;  // what is dropped changes from part to part
  if (options_.ignored) return false;                                     // the losses' scale changes from step to step
  return graphs_->run(step, plan.global_count, inputs, [&](const Inputs& copied) { compute(step, copied, plan); });
}

void TrainingStep::compute(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan) {
  tape_.reset();  // a capture that was refused has left something there
  optimizer_->zero_grad();
  // Shards count their own samples.
  const float begin[] = {0.0f, 0.0f, options_.tree != nullptr ? 0.0f : static_cast<float>(plan.local_count)};
  static_assert(kLoss == 0 && kCount == 2 && kStops == std::size(begin));
  backend_.write(std::as_bytes(std::span(begin)), ddp_.scalars().slice(kLoss, kStops));
  const auto most = static_cast<std::uint64_t>(options_.accumulate);
  const std::uint64_t parts = options_.in_step ? most : std::min(most, plan.local_count);
  if (options_.tree != nullptr) return compute_shards(step, inputs, plan);
  if (parts == 0) {
    flight::set_phase(flight::Phase::kBackward);
    begin_update();
    ddp_.contribute_nothing();
  }
  for (std::uint64_t p = 0; p < parts; ++p)
    compute_part(step, inputs, plan, sampler::slice_of(plan.local_count, p, parts), p + 1 == parts);
  end_update();
  tape_.reset();
}

void TrainingStep::set_tree(const comm::ReductionTree& tree) {
  optimizer_->zero_grad();
  ddp_.set_tree(tree);
  options_.tree = &tree;
}

/// Each shard is a pass of its own; backward of the last one ends when all ranks' sums are there.
void TrainingStep::compute_shards(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan) {
  begin_update();
  ddp_.run_shards(
      tape_, static_cast<std::int64_t>(plan.global_count),
      [&](std::uint32_t shard) { return static_cast<std::int64_t>(shard_of(plan, shard).count); },
      [&](const DistributedDataParallel::ShardPass& pass) {
        const nn::Loss loss = forward_shard(step, inputs, plan, pass.shard, pass.module, pass.tape, pass.backend);
        look_at(loss);
        pass.backend.pointwise().add_to(loss.totals(), 1.0f, pass.scalars.slice(kLoss, kCount));
        pass.backend.pointwise().fill(pass.scalars.slice(kCount, kStops),
                                      static_cast<float>(shard_of(plan, pass.shard).count));
        return loss.value;
      });
  end_update();
}

/// Its rows of the rank's batch.
sampler::Slice TrainingStep::shard_of(const sampler::StepPlan& plan, std::uint32_t shard) const {
  const sampler::Slice all = sampler::slice_of(plan.global_count, shard, options_.tree->leaves());
  return {.begin = all.begin - (plan.local_begin - plan.global_begin), .count = all.count};
}

nn::Loss TrainingStep::forward_shard(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan,
                                     std::uint32_t shard, nn::Module& module, nn::Tape& tape, nn::Backend& backend) {
  const sampler::Slice part = shard_of(plan, shard);
  tape.set_activations(options_.activations);
  tape.set_loss_scale(options_.scaler != nullptr ? options_.scaler->scale() : nn::Tensor());
  if (options_.dropout) {
    const nn::Tensor state = &tape == &tape_ ? dropout_state_ : backend.empty({3}, DType::kI64);
    write_dropout_state(backend, state, step, plan, part);
    tape.set_dropout_state(state);
  }
  return forward(tape, module, rows_of(inputs, part), options_.loss, scale_);
}

std::vector<std::uint64_t> TrainingStep::hash_shards(std::int64_t step, const data::Batch& batch,
                                                     const comm::TreeNode& shards, nn::Module& copy, nn::Tape& tape) {
  const Inputs inputs = with_activations(backend_, upload(batch), options_.activations);
  auto parameters = copy.named_parameters();
  std::erase_if(parameters, [](const auto& named) { return !named.parameter->requires_grad(); });
  std::vector<std::uint64_t> hashes;
  for (std::uint32_t shard = shards.first; shard < shards.end(); ++shard) {
    for (const auto& [name, parameter] : parameters) parameter->clear_grad();
    if (shard_of(batch.plan, shard).count > 0) {
      tape.reset();
      tape.backward(forward_shard(step, inputs, batch.plan, shard, copy, tape, backend_).value);
      tape.reset();
    }
    hashes.push_back(parallel::hash_of_gradients(parameters));  // of none: 0
  }
  return hashes;
}

// Of the last part, backward ends when all ranks' sums are there, and has called update_bucket() for each bucket.
void TrainingStep::compute_part(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan,
                                const sampler::Slice& part, bool last) {
  tape_.reset();
  std::optional<DistributedDataParallel::NoSync> no_sync;
  if (!last) no_sync.emplace(ddp_);
  if (part.count < plan.local_count) write_dropout_state(backend_, dropout_state_, step, plan, part);
  flight::set_phase(flight::Phase::kForward);
  const nn::Loss loss = forward(tape_, ddp_, rows_of(inputs, part), options_.loss, scale_);
  look_at(loss);
  backend_.pointwise().add_to(loss.totals(), 1.0f, ddp_.scalars().slice(kLoss, kCount));
  flight::set_phase(flight::Phase::kBackward);
  if (last) begin_update();
  tape_.backward(loss.value);
}

Inputs TrainingStep::rows_of(const Inputs& inputs, const sampler::Slice& part) {
  if (!inputs.x.defined()) return no_inputs(backend_, format_, options_.activations);
  const auto begin = static_cast<std::int64_t>(part.begin), end = static_cast<std::int64_t>(part.begin + part.count);
  Inputs rows = {.x = inputs.x.slice(begin, end), .targets = inputs.targets.slice(begin, end)};
  for (const nn::Tensor& one : inputs.further) rows.further.push_back(one.slice(begin, end));
  return rows;
}

void TrainingStep::write_dropout_state(nn::Backend& backend, const nn::Tensor& to, std::int64_t step,
                                       const sampler::StepPlan& plan, const sampler::Slice& part) const {
  if (!to.defined()) return;
  const nn::DropoutState state = {
      .seed = static_cast<std::int64_t>(options_.seed),
      .step = step,
      .first_sample = static_cast<std::int64_t>(plan.local_begin - plan.global_begin + part.begin)};
  backend.write(std::as_bytes(std::span(&state, 1)), to);
}

std::string TrainingStep::first_not_finite(std::int64_t step, const data::Batch& batch, bool gradients) {
  if (batch.empty() || (gradients && options_.tree != nullptr)) return {};
  const Inputs inputs = with_activations(backend_, upload(batch), options_.activations);
  std::vector<sampler::Slice> parts;
  if (options_.tree != nullptr) {
    const comm::TreeNode own = options_.tree->run_of(ddp_.group().rank());
    for (std::uint32_t shard = own.first; shard < own.end(); ++shard) parts.push_back(shard_of(batch.plan, shard));
  } else {
    const auto count = std::min(static_cast<std::uint64_t>(options_.accumulate), batch.plan.local_count);
    for (std::uint64_t p = 0; p < count; ++p) parts.push_back(sampler::slice_of(batch.plan.local_count, p, count));
  }
  if (gradients) optimizer_->zero_grad();
  const DistributedDataParallel::NoSync no_sync(ddp_);
  for (const sampler::Slice& part : parts) {
    write_dropout_state(backend_, dropout_state_, step, batch.plan, part);
    const Inputs rows = rows_of(inputs, part);
    std::string found;
    if (gradients) {
      tape_.reset();
      tape_.backward(forward(tape_, ddp_, rows, options_.loss, scale_).value);
      tape_.reset();
      found = first_gradient_not_finite(backend_, ddp_.module());
    } else {
      found = trainer::first_not_finite(backend_, ddp_.module(), tape_, rows);
    }
    if (!found.empty()) return found;
  }
  return {};
}

// Of several shards at a time, on the thread of each.
void TrainingStep::look_at(const nn::Loss& loss) {
  if (backend_.device().kind == DeviceKind::kCpu && !std::isfinite(loss.totals().f32()[0])) own_finite_ = false;
}

// Moves the parameters: each bucket's as soon as its sums are there, or, with clipping or a scaler, all at the end.
// Whether they move at all the device decides, which knows the loss first.
void TrainingStep::begin_update() {
  first_bucket_ = true;
  summed_.clear();
}

void TrainingStep::update_bucket(std::span<const std::size_t> slots) {
  if (options_.trace != nullptr)
    options_.trace->span(Trace::kComputation, "wait for bucket",
                         first_bucket_ ? ddp_.reducer().timeline().waits_from : waiting_since_, Clock::now());
  const bool late = updates_late();
  summed_.insert(summed_.end(), slots.begin(), slots.end());
  flight::set_phase(flight::Phase::kOptimizer);
  if (std::exchange(first_bucket_, false) && !late) optimizer_->compute_update_scale(ddp_.summed_scalars(), {}, 0);
  {
    const TraceSpan span(options_.trace, Trace::kComputation, needs_norm() ? "gradient norm" : "optimizer");
    if (norm_) optimizer_->add_squares(slots);
    if (options_.clip_value > 0) clip_values(slots);
    if (!late) optimizer_->update(slots);
  }
  flight::set_phase(flight::Phase::kBackward);  // which this has interrupted
  if (options_.trace != nullptr) waiting_since_ = Clock::now();
}

bool TrainingStep::finds_norm(std::int64_t step) const {
  const std::int64_t every = options_.norm_every;
  return needs_norm() || (every > 0 && (step == 1 || step % every == 0));
}

// As torch.nn.utils.clip_grad_value_ does it.
void TrainingStep::clip_values(std::span<const std::size_t> slots) {
  const auto most = static_cast<float>(options_.clip_value);
  for (const std::size_t slot : slots) {
    const nn::Parameter& parameter = *ddp_.parameters()[slot].parameter;
    if (!parameter.has_gradient()) continue;
    const nn::Tensor& gradient = parameter.gradient();
    backend_.operators().forward(nn::Clamp{-most, most}, gradient, gradient);
  }
}

void TrainingStep::end_update() {
  flight::set_phase(flight::Phase::kOptimizer);
  const nn::Tensor sums = ddp_.summed_scalars();
  if (norm_) optimizer_->begin_sum_squares();
  if (!updates_late()) ddp_.start_gathering_parameters();  // before anybody waits for the norm
  if (norm_) optimizer_->sum_squares(squares_);
  if (updates_late()) {
    const TraceSpan span(options_.trace, Trace::kComputation, "optimizer");
    optimizer_->compute_update_scale(sums, needs_norm() ? squares_ : nn::Tensor(), options_.clip_norm);
    optimizer_->update(summed_);
  }
  ddp_.start_gathering_parameters();
  if (options_.average != nullptr)
    options_.scaler != nullptr || options_.skips_losses ? options_.average->update(optimizer_->control())
                                                        : options_.average->update();
  if (options_.scaler != nullptr) {
    options_.scaler->update();
    backend_.pointwise().copy(options_.scaler->numbers(), scaling_);
  }
  if (ddp_.defers_unused_check()) backend_.pointwise().copy(ddp_.unused_count(), sums.slice(kUnused, kUnused + 1));
  backend_.pointwise().copy(sums, numbers_.slice(0, kScalars));
}

TrainingStep::Outcome TrainingStep::take_outcome() {
  const auto [begun, bytes] = in_flight_.take([this] {
    ddp_.group().poll();
    throw_if_stopped("training");
  });
  std::array<float, kNumbers> numbers{};
  std::memcpy(numbers.data(), bytes.data(), sizeof numbers);
  const auto sum = [&](Place place) { return static_cast<double>(numbers[static_cast<std::size_t>(place)]); };
  Outcome outcome;
  static_cast<StepInFlight&>(outcome) = begun;
  outcome.totals = {
      .loss = sum(kLoss), .correct = sum(kCorrect), .count = sum(kCount), .stops = sum(kStops), .unused = sum(kUnused)};
  if (outcome.norm) {
    double squares = 0;
    std::memcpy(&squares, numbers.data() + kScalars, sizeof squares);
    outcome.grad_norm = std::sqrt(squares);
    if (options_.scaler != nullptr) {
      const auto known = std::span(numbers).subspan(kScaling);
      const auto after = nn::GradScaler::state_of(known);
      const auto scale = static_cast<double>(known[nn::ScalerState::kLastScale]);
      outcome.grad_norm /= scale;
      outcome.scaling = {.scale = scale,
                         .next_scale = static_cast<double>(after.scale),
                         .skipped = !std::isfinite(squares),
                         .good_steps = after.good_steps,
                         .skipped_steps = after.skipped_steps};
    }
  }
  if (outcome.totals.unused > 0) ddp_.refuse_unused();
  return outcome;
}

StepReport report_of(const TrainingStep::Outcome& outcome, double seconds) {
  return {.step = outcome.step,
          .epoch = static_cast<std::int64_t>(outcome.plan.epoch) + 1,
          .loss = outcome.targets > 0 ? outcome.totals.loss / outcome.targets : 0,
          .lr = outcome.lr,
          .grad_norm = outcome.grad_norm,
          .step_ms = 1e3 * seconds,
          .comm_wait_ms = 1e3 * std::chrono::duration<double>(outcome.waited).count(),
          .samples_per_s = static_cast<double>(outcome.plan.global_count) / seconds,
          .scaling = outcome.scaling};
}

void TrainingStep::ask_to_stop(bool mine) {
  const float value = mine ? 1.0f : 0.0f;
  backend_.write(std::as_bytes(std::span(&value, 1)), ddp_.scalars().slice(kStops, kStops + 1));
}

}  // namespace lockstep::trainer
