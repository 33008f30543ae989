#include "lockstep/trainer/train.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/flight_record.h"
#include "base/kernel.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/status_report.h"
#include "base/text.h"
#include "checkpoint/checkpoints.h"
#include "comm/agree.h"
#include "data/class_report.h"
#include "lockstep/base/env.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/parallel/model_averaging.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/evaluate.h"
#include "trainer/audit.h"
#include "trainer/bad_batches.h"
#include "trainer/best.h"
#include "trainer/build.h"
#include "trainer/carried_state.h"
#include "trainer/checkpoint_parts.h"
#include "trainer/divergence.h"
#include "trainer/memory_estimate.h"
#include "trainer/progress.h"
#include "trainer/reports.h"
#include "trainer/resume.h"
#include "trainer/run_record.h"
#include "trainer/saved_weights.h"
#include "trainer/step.h"
#include "trainer/step_shares.h"
#include "trainer/stragglers.h"
#include "trainer/trace.h"

namespace lockstep::trainer {
namespace {

// One run: what is made once, and the loop over steps.
class Run {
 public:
  Run(const TrainConfig& config, session::Session& session, const TrainHooks& hooks)
      : config_(config),
        hooks_(hooks),
        group_(*session.group),
        backend_(*session.backend),
        mirror_(place_mirror(config, *session.group)),
        checkpoints_(config, checkpoint_directories(config, mirror_, group_.rank())) {
    RunWeights weights;
    session::MemoryNeeds needs;
    shares_.emplace(config_, session);
    comm::run_collectively(group_, [&] {
      weights = apply_weights(config_);
      splits_ = open_splits(config_, weights.metadata);
      apply_targets(config_, *splits_.train);
      if (splits_.validation == nullptr)
        check_needs_no_evaluations(config_);
      else
        check_metric(config_, *splits_.validation);
      shares_->open(splits_.train);
    });
    // Where not all see it, rank 0 gathers the moments of all, which counts.
    if (in_parts(config_, group_.size())) seen_ = look_at_directory(config_.checkpoint_dir, group_);
    comm::run_collectively(group_, [&] {
      if (!config_.estimate_memory) return;
      MemoryPlan plan = shares_->memory_plan(config_.parallel == Parallel::kDp ? session.devices.size() : 1);
      plan.checkpoints = !checkpoint_directories(config_, mirror_, group_.rank()).empty();
      plan.checkpoint_part = seen_ && seen_->elsewhere.empty();
      needs = estimate_memory(config_, backend_, *splits_.train, plan);
    });
    session::check_memory(group_, backend_, needs);
    comm::run_collectively(group_, [&] {
      // The file's tensors go with this statement.
      model_ = build_model(config_, backend_, *splits_.train, std::exchange(weights, {}), group_.rank() == 0);
      if (config_.parallel == Parallel::kDp)
        data_parallel_ = std::make_unique<DataParallelModel>(config_, session, *model_);
      steps_per_epoch_ = static_cast<std::int64_t>(shares_->sampler().steps_per_epoch());
      total_steps_ = total_steps(config_, steps_per_epoch_);
    });
    comm::compare_manifests(group_, manifest_of(config_, *model_, *splits_.train, session.threads));
    checkpoint::CheckpointManifest plan = plan_of(config_, *splits_.train, group_.size(), total_steps_);
    if (!config_.checkpoint_dir.empty() || !config_.resume.empty()) plan.data = data_facts_of(*splits_.train, group_);
    resumed_ = resume_module(config_, mirror_ ? &*mirror_ : nullptr, group_, session.gradients(), plan, *model_);
    if (resumed_) shares_->sampler().restore(resumed_->manifest.position);
    const RunReport run = describe_run(config_, session, *model_, *splits_.train, plan.data, total_steps_);
    comm::run_collectively(group_, [&] {
      if (group_.rank() != 0) return;
      // A run of hours must not find out at its end that its result has no place to go.
      if (!config_.save.empty()) check_saved_place(config_);
      if (!config_.trace.empty()) Trace::check_path(config_.trace);
      reports_ = Reports(config_, run, resumed_, splits_);
    });
    // Its time 0 comes before the first batch that it shows.
    if (!config_.trace.empty()) trace_.emplace(config_.trace, group_);
    comm::run_collectively(group_, [&] { shares_->start(); });
    position_ = shares_->sampler().state();
    if (auto first = shares_->first()) {
      first->step = first_steps();
      report_shares(*first);
    }
    if (config_.sync_batchnorm && parallel::convert_sync_batchnorm(*model_, session.gradients()) == 0 &&
        group_.rank() == 0)
      log_warn("--sync-batchnorm changes nothing: {} has no batch normalisation", config_.model.name);
    auto ddp = ddp_options(config_);
    ddp.tree = shares_->tree();
    ddp.shards_at_once = shares_->shards_at_once();
    ddp.shard_backend = [threads = session.threads] { return nn::make_cpu_backend(threads); };
    if (averages()) ddp.broadcast_buffers = false;  // until an averaging they are each rank's own
    ddp_.emplace(forwarded(), session.gradients(), ddp);
    if (averages())
      ddp_->register_comm_hook(parallel::make_local_hook());
    else
      register_hook(config_, *ddp_);
    auto optimizer = make_optimizer(config_, ddp_->parameters(), ddp_->share());
    if (resumed_) resume_optimizer(*resumed_, group_, session.gradients(), *optimizer, *ddp_);
    if (resumed_) resume_hook_state(*resumed_, ddp_->reducer().comm_hook(), group_);
    scaler_ = make_grad_scaler(config_, backend_);
    if (resumed_ && scaler_ != nullptr) resume_scaler(*resumed_, *scaler_, group_);
    divergence_.emplace(group_, config_.clip_norm > 0, scaler_ == nullptr || scaler_->options().dynamic);
    if (config_.ema) {
      average_.emplace(ddp_->parameters(), *config_.ema);
      if (resumed_) resume_average(*resumed_, group_, session.gradients(), *average_);
    }
    if (averages()) averager_.emplace(session.gradients(), backend_, averaged_tensors(*ddp_, *optimizer));
    const auto part = seen_ ? place_part(*seen_, group_, *ddp_, *optimizer, plan) : std::nullopt;
    comm::run_collectively(group_, [&] {
      checkpoints_.open(*model_, *optimizer, average_ ? &*average_ : nullptr, plan,
                        checkpoint::metadata_of(model_metadata_of(config_, *splits_.train)), resumed_, part);
    });
    if (config_.stateful) {
      carried_.emplace(*model_, group_, shares_->sampler().config().global_batch, dtype_of(config_.precision));
      if (resumed_) resume_carried(*resumed_, group_, *carried_);
    }
    TrainingStep::Options options = step_options(config_);
    options.carried = carried_ ? &*carried_ : nullptr;
    options.average = average_ ? &*average_ : nullptr;
    options.tree = shares_->tree();
    options.scaler = scaler_.get();
    // The file is rank 0's alone. Of sharded updates the norm is a sum over ranks; else they need not know of it.
    options.norm_every = reports_ ? norm_interval(backend_.device()) : 0;
    if (config_.zero > 0) options.norm_every = group_.all_gather_numbers(options.norm_every).front();
    options.trace = trace();
    bad_.emplace(config_.on_bad_batch, group_, backend_, *model_, ddp_->reducer().comm_hook());
    options.skips_losses = bad_->skips_losses();
    if (config_.audit > 0) audit_.emplace(config_.audit, session, *ddp_, *shares_);
    if (averages()) options.loss_scale = static_cast<float>(group_.size());
    step_.emplace(backend_, *ddp_, std::move(optimizer), training_format_of(*splits_.train), options);
    if (resumed_ && mirror_) write_missing_copies();
    if (wants_graphs(config_)) step_->set_graphs(&graphs_.emplace(backend_, *ddp_, options.activations));
    stragglers_.emplace(group_, backend_.steps_ahead() > 0);
    rate_.emplace(schedule_of(config_, total_steps_, group_.size()));
    saved_.emplace(config_, *model_, average_ ? &*average_ : nullptr, *splits_.train);
    if (watches_evaluations(config_)) best_.emplace(config_);
    if (best_ && resumed_) resume_best(config_, resumed_->manifest, *saved_, group_, *best_);
  }

  int execute() {
    try {
      return train_and_report();
    } catch (...) {
      flush_progress();
      if (trace_) trace_->write_own();
      throw;
    }
  }

 private:
  int train_and_report() {
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
    if (resumed_) {
      progress.announce(fmt::format("resuming at step {}, from {}", first_steps() + 1, resumed_->path));
      // Checkpoints are taken before the evaluation that is due after their steps.
      const sampler::SamplerState at = shares_->sampler().state();
      const bool between = at.cursor == 0;
      if ((first_steps() == total_steps_ || evaluation_due(first_steps(), between ? at.epoch : 0)) &&
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
      const bool checkpoint = checkpoints_.due(step, plan.last_of_epoch, last) || (evaluates && config_.keep_best > 0);
      if (const auto left_out = bad_->look(step, batch, checkpoints_.wanted() && stop_request() != 0))
        leave_out(*left_out);
      else
        begin_step(step, batch, checkpoint);
      bool check = config_.check_replicas > 0 && step % config_.check_replicas == 0;
      position_ = batch.state_after;
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

  // No evaluation was better for as long as --patience says: the run ends with a checkpoint, as if it had been meant
  // to.
  int give_up(std::int64_t step, Progress& progress, const EvalReport& evaluation) {
    gave_up_ = true;
    take_checkpoint(step, progress);
    finish(progress, evaluation, step);
    return 0;
  }

  // Ranks take steps alone (parallel: Note [Local SGD]).
  bool averages() const { return config_.local_sgd > 0; }

  void average(std::int64_t step) {
    const TraceSpan span(trace(), Trace::kSteps, "average");
    if (graphs_) graphs_->expect_other_work();
    ddp_->group().set_step(step);
    averager_->average();
    for (const auto& [name, parameter] : ddp_->parameters()) parameter->changed();
    ddp_->broadcast_buffers();
  }

  std::int64_t first_steps() const { return resumed_ ? resumed_->manifest.step : 0; }

  // After `step`, with which epoch `epoch`, from 1, ends; 0: none does.
  bool evaluation_due(std::int64_t step, std::uint64_t epoch) const {
    if (config_.eval_steps > 0) return step % config_.eval_steps == 0;
    return epoch > 0 && config_.eval_every > 0 && epoch % static_cast<std::uint64_t>(config_.eval_every) == 0;
  }

  // What one rank saves is to be what all of them have.
  void check_replicas(std::int64_t step) {
    if (std::exchange(checked_, step) != step) ddp_->check();
  }

  void take_checkpoint(std::int64_t step, Progress& progress) {
    const auto since = Clock::now();
    const Progress::Pause pause(progress, Pace::Pause::kCheckpoint, step);
    if (checkpoints_.wanted()) check_replicas(step);
    reports_.flush();
    const TraceSpan span(trace(), Trace::kSteps, "checkpoint");
    flight::set_phase(flight::Phase::kCheckpoint);
    const bool mirrored = mirror_ && mirror_->rank > 0 && checkpoints_.is_new(step);
    if (mirrored) {
      if (graphs_) graphs_->expect_other_work();
      ddp_->broadcast_buffers();  // rank 0's are the run's
    }
    checkpoint::ExtraState extra;
    if (checkpoints_.wanted() && checkpoints_.is_new(step)) {
      settle_parts(checkpoints_, group_);
      extra = gather_extra_state(0);
      if (mirrored)
        if (auto there = gather_extra_state(mirror_->rank); group_.rank() == mirror_->rank) extra = std::move(there);
    }
    checkpoints_.take(step, since, position_, step_->optimizer().steps(), bucket_layout_of(*ddp_), std::move(extra));
  }

  // Collective: what rank `root` writes and has not.
  checkpoint::ExtraState gather_extra_state(int root) {
    checkpoint::ExtraState extra;
    if (carried_) extra.files[checkpoint::kCarriedFile] = carried_->gather(root);
    extra.files[checkpoint::kHookFile] = gather_hook_state(ddp_->reducer().comm_hook(), group_, root);
    if (group_.rank() == root) extra.files[checkpoint::kScalerFile] = scaler_tensors(scaler_.get());
    extra.moments = gather_moments(checkpoints_, *ddp_, step_->optimizer(), root);
    if (best_) {
      // Who resumes evaluates once more what made this run give up.
      extra.evaluations = gave_up_ ? best_->history_before() : best_->history();
    }
    return extra;
  }

  // A disk was lost, or ranks run on other hosts: there are two copies again as soon as there can be.
  void write_missing_copies() {
    const auto lacking = group_.all_gather_numbers(checkpoints_.lacks_copy() ? 1 : 0);
    if (std::ranges::max(lacking) == 0) return;
    checkpoint::ExtraState extra;
    // Where an epoch begins, the model carries zeros: the checkpoint has them too.
    for (int rank = 0; rank < group_.size(); ++rank)
      if (lacking[static_cast<std::size_t>(rank)] != 0)
        if (auto there = gather_extra_state(rank); rank == group_.rank()) extra = std::move(there);
    checkpoints_.write_missing_copies(resumed_->manifest, std::move(extra));
  }

  // Once they are on the disk: a few steps later, or at the end.
  void report_checkpoints(Progress& progress) {
    while (const auto written = checkpoints_.written()) {
      const CheckpointReport report = report_of(*written);
      reports_.write(report);
      progress.checkpoint(report);
    }
  }

  // Someone has asked some rank to stop, and all know.
  int leave(std::int64_t step, Progress& progress) {
    take_checkpoint(step, progress);
    const auto saved = group_.all_gather_numbers(finish_checkpoints(checkpoints_, group_) ? 1 : 0);
    report_checkpoints(progress);
    const auto asked = group_.all_gather_numbers(stop_request());
    checkpoints_.tell_failures();
    if (trace_) progress.saved(trace_->write(group_));
    if (saved.front() == 0)
      throw InterruptedError(static_cast<int>(*std::ranges::max_element(asked)),
                             fmt::format("stopped after step {} without a checkpoint of it", step));
    log_info("stopped after step {} of {}, which is saved in {} → the same command with --resume auto resumes it", step,
             total_steps_, config_.checkpoint_dir);
    return static_cast<int>(ExitCode::kCheckpointed);
  }

  /// What batches go through: the model, or what shares them out to several.
  nn::Module& forwarded() { return data_parallel_ ? data_parallel_->module() : *model_; }

  // See Note [Bad batches].
  void leave_out(const SkippedReport& report) {
    throw_if_stopped("training");
    if (bad_->stop_wanted()) stop_wanted_ = true;
    stragglers_->forget_data();
    reports_.write(report);
    report_progress(report.step);
  }

  void report_shares(const BalanceReport& report) {
    reports_.write(report);
    if (group_.rank() == 0) log_info("from step {} on {}", report.step + 1, describe(report, config_.shards > 0));
  }

  // See Note [Balance].
  void follow_shares(std::int64_t step) {
    const auto since = Clock::now();
    const auto found = shares_->follow(stragglers_->take_window(), step, total_steps_ - step, position_);
    if (!found) return;
    if (shares_->tree() != nullptr) step_->set_tree(*shares_->tree());
    report_shares(*found);
    shares_->change_took(seconds_between(since, Clock::now()));
  }

  Trace* trace() { return trace_ ? &*trace_ : nullptr; }

  const data::Batch& next_batch() {
    const TraceSpan span(trace(), Trace::kComputation, "data");
    flight::set_phase(flight::Phase::kData);
    const auto asked = Clock::now();
    const data::Batch& batch = shares_->next();
    stragglers_->data_took(Clock::now() - asked);
    if (trace_ && !batch.empty() && batch.error == nullptr)
      trace_->span(Trace::kFirstLoader + batch.worker, "assemble batch", batch.assembly_begin, batch.assembly_end);
    return batch;
  }

  void begin_step(std::int64_t step, const data::Batch& batch, bool checkpoint) {
    throw_if_stopped("training");
    if (checkpoints_.wanted()) step_->ask_to_stop(stop_request() != 0);
    if (audit_ && audit_->due(step, checkpoint)) audit_->begin(step, batch, position_, *step_);
    stragglers_->begin_step();
    bad_->keep_statistics();
    batch_ = &batch;
    step_->run(step, batch, rate_of(hooks_, *rate_, step - 1, total_steps_, best_ ? &*best_ : nullptr),
               rate_->momentum_at(step - 1));
  }

  // How long a step takes is how long a stop takes. Not oftener than the launcher needs it.
  void tell_launcher(double step_seconds, Clock::time_point now) {
    if (!checkpoints_.wanted() || now < next_status_) return;
    next_status_ = now + std::chrono::seconds(1);
    report_status({.kind = StatusReport::Kind::kDefersStops, .seconds = step_seconds});
  }

  // Of the oldest step that has not been reported. On a device steps overlap: one counts from the end of that before.
  void report_step(Progress& progress) {
    const TrainingStep::Outcome outcome = step_->take_outcome();
    const auto now = Clock::now();
    const double seconds = seconds_between(std::max(outcome.begin, last_end_), now);
    last_end_ = now;
    LOCKSTEP_ASSERT(static_cast<std::uint64_t>(outcome.totals.count) == outcome.plan.global_count, "{} of {} samples",
                    outcome.totals.count, outcome.plan.global_count);
    if (outcome.totals.stops > 0) stop_wanted_ = true;
    if (const auto left_out = bad_->look(outcome, *batch_, !step_->own_loss_is_finite())) {
      step_->forget_step();
      return leave_out(*left_out);
    }
    StepReport report = report_of(outcome, seconds);
    report.samples = samples_ += static_cast<std::int64_t>(outcome.plan.global_count);
    report.memory_bytes = reports_.memory_bytes(backend_, now);
    report_progress(report.step);
    tell_launcher(seconds, now);
    divergence_->follow(report, bad_->whose());
    train_seconds_ += seconds;
    wait_seconds_ += 1e-3 * report.comm_wait_ms;
    if (log_enabled(LogLevel::kDebug))
      for (const auto& line : split(describe(ddp_->reducer().timeline()), '\n'))
        log_debug("step {}: {}", report.step, line);
    reports_.write(report);
    progress.step(report);
    if (hooks_.on_step) hooks_.on_step(report);
    if (const auto slow = stragglers_->end_step(duration_of(seconds), outcome.plan.local_count))
      log_warn("step {}: {}", report.step, slow->text);
    report_checkpoints(progress);
  }

  // Whether it came to an end; the ranks may have been asked to stop.
  bool evaluate(std::optional<Evaluator>& evaluator, std::int64_t step, std::uint64_t epochs_done, Progress& progress,
                EvalReport& report) {
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
      report.best = best_ && average == average_.has_value() && best_->follow(report);
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

  std::int64_t epochs_of(std::int64_t steps) const { return (steps - 1) / steps_per_epoch_ + 1; }  // begun

  // The numbers are reported before the weights are saved: they stay even if those cannot be written.
  void finish(Progress& progress, const EvalReport& evaluation, std::int64_t steps) {
    flight::set_phase(flight::Phase::kEnding);
    ddp_->check_with_buffers();  // which the evaluation has made equal
    if (ddp_->choosing_buckets() && group_.rank() == 0) log_warn("the run ended before --bucket-mb auto had chosen");
    const bool checkpointed = finish_checkpoints(checkpoints_, group_);
    report_checkpoints(progress);
    const FinalReport report{.steps = steps,
                             .epochs = epochs_of(steps),
                             .world_size = group_.size(),
                             .wall_s = seconds_between(start_, Clock::now()),
                             .loss = evaluation.loss,
                             .accuracy = evaluation.accuracy,
                             .auc = evaluation.auc,
                             .errors = evaluation.errors,
                             .peak_memory_bytes = group_.all_gather_numbers(peak_resident_bytes()),
                             .times = stragglers_->means(),
                             .params_sha256 = group_.rank() == 0 ? nn::parameters_sha256(*model_) : std::string(),
                             .hook = hook_report_of(ddp_->reducer()),
                             .ema_params_sha256 = average_sha256(),
                             .scaling = scaling_of(scaler_.get()),
                             .best = best_ ? best_->history().best : std::nullopt,
                             .gave_up = gave_up_,
                             .skipped = bad_->count(),
                             .audits = audit_ ? audit_->count() : 0,
                             .kept = best_ ? best_->history().kept : std::vector<BestEvaluation>()};
    reports_.write(report);
    if (group_.rank() == 0)
      progress.summary({.final = report,
                        .steps_here = steps - first_steps(),
                        .samples = samples_,
                        .train_s = train_seconds_,
                        .comm_wait_s = wait_seconds_,
                        .stragglers = stragglers_->found()});
    if (const auto all = checkpoints_.summary(); all.count > 0)
      progress.announce(describe(all, config_.checkpoint_dir, report.wall_s));
    checkpoints_.tell_failures();
    warn_of_corrupt(splits_, group_);
    comm::run_collectively(group_, [&] {
      if (group_.rank() == 0) progress.saved(saved_->finish(best_ ? best_->history().best : std::nullopt));
    });
    if (trace_) progress.saved(trace_->write(group_));
    flush_progress();
    comm::run_collectively(group_, [&] {
      // Who runs this until it exits with 0 must not take it for saved.
      if (!checkpointed)
        throw IoError(fmt::format("training is complete, but its last checkpoint, of step {}, is not in {}", steps,
                                  config_.checkpoint_dir),
                      "the warnings above say why; free some space or choose another --checkpoint-dir");
      if (!reports_.failure().empty())
        throw IoError(reports_.failure(),
                      "free some space and train again if the metrics matter; all else is complete");
    });
    report_status({.kind = StatusReport::Kind::kDone});
  }

  std::string average_sha256() {
    if (!average_ || group_.rank() != 0) return {};
    const auto in_place = average_->in_place();
    return nn::parameters_sha256(*model_);
  }

  TrainConfig config_;
  const TrainHooks& hooks_;
  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  Clock::time_point start_ = Clock::now();

  data::DataSplits splits_;
  std::unique_ptr<nn::Module> model_;
  std::unique_ptr<DataParallelModel> data_parallel_;  // nullptr: this process computes on one device
  std::optional<StepShares> shares_;
  Reports reports_;  // rank 0's
  std::int64_t steps_per_epoch_ = 0, total_steps_ = 0;
  std::optional<Trace> trace_;
  std::optional<checkpoint::Resumed> resumed_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<parallel::ModelAverager> averager_;  // nothing: gradients are summed
  std::optional<nn::MovingAverage> average_;
  std::optional<CarriedState> carried_;
  std::unique_ptr<nn::GradScaler> scaler_;  // nullptr: losses are not scaled
  std::optional<DivergenceWatch> divergence_;
  std::optional<StepGraphs> graphs_;
  std::optional<TrainingStep> step_;
  std::optional<Mirror> mirror_;
  std::optional<SeenDirectory> seen_;    // nothing: no checkpoints in parts are wanted
  checkpoint::Checkpoints checkpoints_;  // its thread only has what it was given
  sampler::SamplerState position_;       // after the last step that has begun
  std::int64_t checked_ = 0;             // the step after which replicas were compared last
  bool stop_wanted_ = false;
  std::optional<nn::LearningRate> rate_;
  std::optional<SavedWeights> saved_;
  std::optional<BestWatch> best_;  // nothing: evaluations decide nothing
  bool gave_up_ = false;
  std::optional<StragglerWatch> stragglers_;
  std::optional<BadBatches> bad_;
  std::optional<Audit> audit_;          // nothing: no step is audited
  const data::Batch* batch_ = nullptr;  // of the last step that has begun, until the next one
  Clock::time_point last_end_{};        // of a step
  Clock::time_point next_status_{};
  double train_seconds_ = 0, wait_seconds_ = 0;
  std::int64_t samples_ = 0;
};

}  // namespace

int train(const TrainConfig& given, const std::optional<UsageError>& refusal) {
  return run_training(given, refusal, {});
}

int run_training(const TrainConfig& given, const std::optional<UsageError>& refusal, const TrainHooks& hooks) {
  watch_for_stops();
  TrainConfig config = with_saved_file(given);
  if (config.shards > 0) config.default_threads = threads_of_a_shard(config);
  session::Session session = open_session(config, refusal);
  std::optional<DeferredStops> deferred;
  int code = 0;
  {
    Run run(config, session, hooks);
    if (!config.checkpoint_dir.empty()) deferred.emplace();
    code = run.execute();
  }
  if (code == static_cast<int>(ExitCode::kCheckpointed) && env("LOCKSTEP_LAUNCHER"))
    session.leave();
  else
    session.shutdown();
  return code;
}

}  // namespace lockstep::trainer
