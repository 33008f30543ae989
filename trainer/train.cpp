#include "trainer/run.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/status_report.h"
#include "base/text.h"
#include "data/class_report.h"
#include "lockstep/base/env.h"
#include "session/opening.h"

namespace lockstep::trainer {

std::optional<int> Run::execute() {
  try {
    return train_and_report();
  } catch (const Diverged& diverged) {
    begin_rewind(diverged);
    return std::nullopt;
  } catch (...) {
    flush_progress();
    if (trace_) trace_->write_own();
    if (own_.rejoins) keep_state();
    throw;
  }
}

int Run::train_and_report() {
  Progress progress(Progress::style_for(group_.rank(), config_.quiet),
                    plan_of_run(config_, shares_->sampler(), splits_.validation.get(), first_steps(), total_steps_),
                    config_.log_every);
  if (group_.rank() == 0) data::warn_of_classes(splits_);
  progress.announce(title_of(config_, *splits_.train, group_.size(), shares_->sampler().config().global_batch,
                             data_parallel_ ? data_parallel_->describe() : backend_.describe(),
                             backend_.device().kind));
  std::optional<Evaluator> evaluator;
  if (splits_.validation != nullptr)
    evaluator.emplace(group_, backend_, splits_.validation, shares_->samples_at_once(), config_.workers,
                      dtype_of(config_.precision), evaluation_loss(config_));
  if (evaluator && measures_outputs(config_)) evaluator->measure();
  if (evaluator) evaluator->add_metrics(own_metrics());
  if (evaluator) evaluator->ignore(ignored_label_of(config_));
  if (evaluator && shares_->tree() != nullptr) evaluator->add_along_tree();
  EvalReport evaluation{.loss = std::nan(""), .accuracy = std::nan("")};
  if (resumed_) progress.announce(fmt::format("resuming at step {}, from {}", first_steps() + 1, resumed_->path));
  // A run that goes back has evaluated there.
  if (resumed_ && !rewound_) {
    // Checkpoints are taken before the evaluation that is due after their steps.
    const sampler::SamplerState at = shares_->sampler().state();
    const bool between = at.cursor == 0, evaluates = evaluation_due(first_steps(), between ? at.epoch : 0);
    // The failure may have kept it from being taken.
    if (resumed_->in_memory && first_steps() > 0 && checkpoint_due(first_steps(), between, evaluates))
      take_checkpoint(first_steps(), progress);
    if ((first_steps() == total_steps_ || evaluates) &&
        !evaluate(evaluator, first_steps(), between ? at.epoch : at.epoch + 1, progress, evaluation))
      return leave(first_steps(), progress);
  }
  if (best_ && best_->gives_up()) return give_up(first_steps(), progress, evaluation);
  for (std::int64_t step = first_steps() + 1; step <= total_steps_; ++step) {
    if (trace_) trace_->set_step(step);
    flight::set_step(step);
    const data::Batch& batch = next_batch();
    const sampler::StepPlan plan = batch.plan;
    const bool last = step == total_steps_;
    const auto epoch = static_cast<std::int64_t>(plan.epoch) + 1;
    const bool evaluates = evaluation_due(step, plan.last_of_epoch ? plan.epoch + 1 : 0);
    const bool checkpoint = checkpoint_due(step, plan.last_of_epoch, evaluates);
    const auto left_out = bad_->look(step, batch, checkpoints_.wanted() && stop_request() != 0);
    if (!left_out) begin_step(step, batch, checkpoint);
    bool check = config_.check_replicas > 0 && step % config_.check_replicas == 0;
    position_ = batch.state_after;
    if (left_out) leave_out(*left_out);
    const bool averaging = averages() && (step % config_.local_sgd == 0 || plan.last_of_epoch || last);
    if (averaging) average(step);
    const bool looks = config_.histogram_steps > 0 && step % config_.histogram_steps == 0;
    const bool pause = check || last || evaluates || checkpoint || looks || (plan.last_of_epoch && hooks_.on_epoch);
    while (step_->outcome_due() || ((pause || stop_wanted_) && step_->outcomes_waiting() > 0)) report_step(progress);
    if (audit_ && audit_->end(*step_)) check = true;
    if (looks) reports_.write(TensorReport{step, backend_, ddp_->parameters()});
    if (check) check_replicas(step);
    if (checkpoint) take_checkpoint(step, progress);
    if (stop_wanted_ && (averaging || !averages())) return leave(step, progress);
    if ((last || evaluates) && !evaluate(evaluator, step, static_cast<std::uint64_t>(epoch), progress, evaluation))
      return leave(step, progress);
    if (plan.last_of_epoch && hooks_.on_epoch) hooks_.on_epoch(epoch);
    if (!last && best_ && best_->gives_up()) return give_up(step, progress, evaluation);
    if (!last) follow_shares(step);
  }
  finish(progress, evaluation, total_steps_);
  return 0;
}

void Run::average(std::int64_t step) {
  const TraceSpan span(trace(), Trace::kSteps, "average");
  if (graphs_) graphs_->expect_other_work();
  ddp_->group().set_step(step);
  averager_->average();
  for (const auto& [name, parameter] : ddp_->parameters()) parameter->changed();
  ddp_->broadcast_buffers();
}

// After `step`, with which epoch `epoch`, from 1, ends; 0: none does.
bool Run::evaluation_due(std::int64_t step, std::uint64_t epoch) const {
  if (config_.eval_steps > 0) return step % config_.eval_steps == 0;
  return epoch > 0 && config_.eval_every > 0 && epoch % static_cast<std::uint64_t>(config_.eval_every) == 0;
}

bool Run::checkpoint_due(std::int64_t step, bool last_of_epoch, bool evaluates) const {
  return checkpoints_.due(step, last_of_epoch, step == total_steps_) || (evaluates && config_.keep_best > 0);
}

// What one rank saves is to be what all of them have.
void Run::check_replicas(std::int64_t step) {
  if (std::exchange(checked_, step) != step) ddp_->check();
}

// See Note [Bad batches].
void Run::leave_out(const SkippedReport& report) {
  throw_if_stopped("training");
  complete(report.step);
  if (bad_->stop_wanted()) stop_wanted_ = true;
  stragglers_->forget_data();
  reports_.write(report);
  if (own_.rejoins) reports_.flush();
  report_progress(report.step);
}

void Run::report_shares(const BalanceReport& report) {
  reports_.write(report);
  if (group_.rank() == 0) log_info("from step {} on {}", report.step + 1, describe(report, config_.shards > 0));
}

// See Note [Balance].
void Run::follow_shares(std::int64_t step) {
  const auto since = Clock::now();
  const auto found = shares_->follow(stragglers_->take_window(), step, total_steps_ - step, position_);
  if (!found) return;
  if (shares_->tree() != nullptr) step_->set_tree(*shares_->tree());
  report_shares(*found);
  shares_->change_took(seconds_between(since, Clock::now()));
}

const data::Batch& Run::next_batch() {
  const TraceSpan span(trace(), Trace::kComputation, "data");
  flight::set_phase(flight::Phase::kData);
  const auto asked = Clock::now();
  const data::Batch& batch = shares_->next();
  stragglers_->data_took(Clock::now() - asked);
  if (trace_ && !batch.empty() && batch.error == nullptr)
    trace_->span(Trace::kFirstLoader + batch.worker, "assemble batch", batch.assembly_begin, batch.assembly_end);
  return batch;
}

void Run::begin_step(std::int64_t step, const data::Batch& batch, bool checkpoint) {
  throw_if_stopped("training");
  if (checkpoints_.wanted()) step_->ask_to_stop(stop_request() != 0);
  if (audit_ && audit_->due(step, checkpoint)) audit_->begin(step, batch, position_, *step_);
  stragglers_->begin_step();
  bad_->keep_statistics();
  statistics_kept_ = true;
  batch_ = &batch;
  step_->run(step, batch, rate_of(hooks_, *rate_, step - 1, total_steps_, best_ ? &*best_ : nullptr),
             rate_->momentum_at(step - 1));
}

// How long a step takes is how long a stop takes. Not oftener than the launcher needs it.
void Run::tell_launcher(double step_seconds, Clock::time_point now) {
  if (!checkpoints_.wanted() || now < next_status_) return;
  next_status_ = now + std::chrono::seconds(1);
  report_status({.kind = StatusReport::Kind::kDefersStops, .seconds = step_seconds});
}

// Of the oldest step that has not been reported. On a device steps overlap: one counts from the end of that before.
void Run::report_step(Progress& progress) {
  const TrainingStep::Outcome outcome = step_->take_outcome();
  const auto now = Clock::now();
  const double seconds = seconds_between(std::max(outcome.begin, last_end_), now);
  last_end_ = now;
  LOCKSTEP_ASSERT(static_cast<std::uint64_t>(outcome.totals.count) == outcome.plan.global_count, "{} of {} samples",
                  outcome.totals.count, outcome.plan.global_count);
  if (outcome.totals.stops > 0) stop_wanted_ = true;
  const auto find = [&](bool gradients) { return step_->first_not_finite(outcome.step, *batch_, gradients); };
  if (const auto left_out = bad_->look(outcome, *batch_, !step_->own_loss_is_finite(), [&] { return find(false); })) {
    step_->forget_step();
    return leave_out(*left_out);
  }
  StepReport report = report_of(outcome, seconds);
  report.samples = samples_ += static_cast<std::int64_t>(outcome.plan.global_count);
  report.memory_bytes = reports_.memory_bytes(backend_, now);
  if (divergence_->is_of_gradients(report)) bad_->look_at_gradients(*batch_, [&] { return find(true); });
  complete(report.step);
  own_.report = report;
  report_progress(report.step);
  if (report.step == first_steps() + 1) flush_progress();  // somebody may wait for it
  tell_launcher(seconds, now);
  divergence_->follow(report, bad_->whose());
  train_seconds_ += seconds;
  wait_seconds_ += 1e-3 * report.comm_wait_ms;
  if (log_enabled(LogLevel::kDebug))
    for (const auto& line : split(describe(ddp_->reducer().timeline()), '\n'))
      log_debug("step {}: {}", report.step, line);
  reports_.write(report);
  if (own_.rejoins) reports_.flush();  // the next one may not come
  progress.step(report);
  if (hooks_.on_step) hooks_.on_step(report);
  if (const auto slow = stragglers_->end_step(duration_of(seconds), outcome.plan.local_count))
    log_warn("step {}: {}", report.step, slow->text);
  report_checkpoints(progress);
}

// Whether it came to an end; the ranks may have been asked to stop.
bool Run::evaluate(std::optional<Evaluator>& evaluator, std::int64_t step, std::uint64_t epochs_done,
                   Progress& progress, EvalReport& report) {
  if (!evaluator) return true;
  const TraceSpan span(trace(), Trace::kSteps, "evaluate");
  const Progress::Pause pause(progress, Pace::Pause::kEvaluation, step);
  flight::set_phase(flight::Phase::kEvaluation);
  if (graphs_) graphs_->expect_other_work();
  ddp_->broadcast_buffers();  // what is evaluated is one model, rank 0's: the one that is saved
  const auto epoch = static_cast<std::int64_t>(epochs_done);
  const auto evaluate_once = [&](bool average) {
    report = evaluator->run(forwarded(), step);
    report.of_average = average;
    report.epoch = epoch;
    report.split = kSplitValidation;
    if (report.stopped) return false;
    // As timm does: the average's result is the run's.
    if (best_ && average == average_.has_value()) {
      report.best = best_->follow(report);
      evaluated_ = step;
    }
    reports_.write(report);
    progress.evaluation(report, epoch, best_ ? best_->history().best : std::nullopt);
    if (hooks_.on_evaluation) hooks_.on_evaluation(report);
    divergence_->follow(report, epoch);
    return true;
  };
  if (!evaluate_once(false)) return false;
  if (average_) {
    const auto in_place = average_->in_place();
    if (!evaluate_once(true)) return false;
  }
  if (report.best && keeps_best_weights(config_) && group_.rank() == 0)
    progress.saved(saved_->save_best(*best_->history().best));
  return true;
}

int train(const TrainConfig& given, const std::optional<UsageError>& refusal) {
  return run_training(given, refusal, {});
}

namespace {

/// One run in one session. What `own` has to keep is on a backend of that session.
int run_once(const TrainConfig& config, const std::optional<UsageError>& refusal, const TrainHooks& hooks,
             Survivor& own) {
  session::Session session = open_session(config, refusal);
  if (own.backend != nullptr) session.backend = std::move(own.backend);
  const OnExit keep([&] {
    if (own.rejoins)
      own.backend = std::move(session.backend);
    else
      own.clear();
  });
  std::optional<DeferredStops> deferred;
  std::optional<int> code;
  std::optional<Run::Rewound> rewound;
  while (!code) {
    TrainConfig again = config;
    if (rewound) {
      again.resume = rewound->resume;
      own.clear();
    }
    Run run(again, session, hooks, own, rewound);
    if (!config.checkpoint_dir.empty() && !deferred) deferred.emplace();
    code = run.execute();
    rewound = run.rewound();
  }
  own.clear();
  if (code == static_cast<int>(ExitCode::kCheckpointed) && env("LOCKSTEP_LAUNCHER"))
    session.leave();
  else
    session.shutdown();
  return *code;
}

}  // namespace

int run_training(const TrainConfig& given, const std::optional<UsageError>& refusal, const TrainHooks& hooks) {
  watch_for_stops();
  TrainConfig config = with_saved_file(given);
  if (config.shards > 0) config.default_threads = threads_of_a_shard(config);
  Survivor own;
  const auto processors = session::keep_processors();
  if (is_spare() && !wait_for_others(own)) return 0;
  for (;;) {
    try {
      return run_once(config, refusal, hooks, own);
    } catch (const Error& error) {
      if (!own.rejoins || !may_be_a_loss(error) || !wait_for_others(own)) throw;
      log_debug("continues after: {}", error.line());
    }
    processors();
  }
}

}  // namespace lockstep::trainer
