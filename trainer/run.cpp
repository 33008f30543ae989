#include "trainer/run.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/flight_record.h"
#include "base/kernel.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/status_report.h"
#include "base/text.h"
#include "comm/agree.h"
#include "lockstep/base/env.h"
#include "lockstep/nn/io/state.h"
#include "trainer/memory_estimate.h"
#include "trainer/run_record.h"

namespace lockstep::trainer {

Run::Run(const TrainConfig& config, session::Session& session, const TrainHooks& hooks, Survivor& own,
         const std::optional<Rewound>& rewound)
    : own_(own),
      config_(own.config ? *own.config : config),
      hooks_(hooks),
      group_(*session.group),
      backend_(*session.backend),
      rewound_(rewound),
      mirror_(place_mirror(config, *session.group)),
      checkpoints_(config, checkpoint_directories(config, mirror_, group_.rank()),
                   group_.rank() == 0 ? config.metrics : std::string()) {
  RunWeights weights;
  session::MemoryNeeds needs;
  shares_.emplace(config_, session);
  const bool has_model = own_.model != nullptr;
  comm::run_collectively(group_, [&] {
    if (!has_model) {
      weights = apply_weights(config_);
      splits_ = open_splits(config_, weights.metadata);
      apply_targets(config_, *splits_.train);
    }
    if (splits_.validation == nullptr)
      check_needs_no_evaluations(config_);
    else
      check_metric(config_, *splits_.validation);
    shares_->open(splits_.train);
  });
  // Where not all see it, rank 0 gathers the moments of all, which counts.
  if (in_parts(config_, group_.size())) seen_ = look_at_directory(config_.checkpoint_dir, group_);
  comm::run_collectively(group_, [&] {
    if (!config_.estimate_memory || has_model) return;
    MemoryPlan plan = shares_->memory_plan(config_.parallel == Parallel::kDp ? session.devices.size() : 1);
    plan.checkpoints = !checkpoint_directories(config_, mirror_, group_.rank()).empty();
    plan.checkpoint_part = seen_ && seen_->elsewhere.empty();
    needs = estimate_memory(config_, backend_, *splits_.train, plan);
  });
  session::check_memory(group_, backend_, needs);
  comm::run_collectively(group_, [&] {
    // The file's tensors go with this statement.
    if (!has_model)
      model_ = build_model(config_, backend_, *splits_.train, std::exchange(weights, {}), group_.rank() == 0);
    if (config_.parallel == Parallel::kDp)
      data_parallel_ = std::make_unique<DataParallelModel>(config_, session, *model_);
    steps_per_epoch_ = static_cast<std::int64_t>(shares_->sampler().steps_per_epoch());
    total_steps_ = total_steps(config_, steps_per_epoch_);
  });
  comm::compare_manifests(group_, manifest_of(config_, *model_, *splits_.train, session.threads));
  checkpoint::CheckpointManifest plan = plan_of(config_, *splits_.train, group_.size(), total_steps_);
  if (!config_.checkpoint_dir.empty() || !config_.resume.empty()) plan.data = data_facts_of(*splits_.train, group_);
  if (launcher_keeps_survivors()) resumed_ = resume_from_survivors(own_, group_, session.gradients(), plan, *model_);
  if (!resumed_)
    resumed_ = resume_module(config_, mirror_ ? &*mirror_ : nullptr, group_, session.gradients(), plan, *model_);
  if (resumed_ || rewound_) shares_->sampler().restore(rewound_ ? rewound_->position : resumed_->manifest.position);
  if (rewound_) rewound_->report.to = first_steps();
  const RunReport run = describe_run(config_, session, *model_, *splits_.train, plan.data, total_steps_);
  comm::run_collectively(group_, [&] {
    if (group_.rank() != 0) return;
    // A run of hours must not find out at its end that its result has no place to go.
    if (!config_.save.empty()) check_saved_place(config_);
    if (!config_.trace.empty()) Trace::check_path(config_.trace);
    const bool has_report = resumed_ && resumed_->in_memory && own_.report.step == first_steps();
    reports_ = Reports(config_, run, resumed_, splits_, has_report ? &own_.report : nullptr,
                       rewound_ ? &rewound_->report : nullptr);
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
  if (own_.optimizer == nullptr) own_.optimizer = make_optimizer(config_, ddp_->parameters(), ddp_->share());
  const auto optimizer = own_.optimizer;
  if (resumed_) resume_optimizer(*resumed_, group_, session.gradients(), *optimizer, *ddp_);
  if (resumed_ && !resumed_->in_memory) resume_hook_state(*resumed_, ddp_->reducer().comm_hook(), group_);
  scaler_ = make_grad_scaler(config_, backend_);
  if (resumed_ && scaler_ != nullptr) resume_scaler(*resumed_, *scaler_, group_);
  divergence_.emplace(group_, config_.clip_norm > 0, scaler_ == nullptr || scaler_->options().dynamic,
                      rewinds() < parse_divergence(config_.on_divergence).most);
  if (config_.ema) {
    if (!average_) average_.emplace(ddp_->parameters(), *config_.ema);
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
  if (launcher_keeps_survivors()) look_at_survival(session);
  options.late = own_.rejoins;
  bad_.emplace(config_.on_bad_batch, group_, backend_, *model_, ddp_->reducer().comm_hook(), own_.rejoins);
  options.skips_losses = bad_->skips_losses();
  if (config_.audit > 0) audit_.emplace(config_.audit, session, *ddp_, *shares_);
  if (averages()) options.loss_scale = static_cast<float>(group_.size());
  step_.emplace(backend_, *ddp_, optimizer, training_format_of(*splits_.train), options);
  if (resumed_ && !resumed_->in_memory && mirror_) write_missing_copies();
  if (wants_graphs(config_)) step_->set_graphs(&graphs_.emplace(backend_, *ddp_, options.activations));
  stragglers_.emplace(group_, backend_.steps_ahead() > 0);
  rate_.emplace(schedule_of(config_, total_steps_, group_.size()));
  saved_.emplace(config_, *model_, average_ ? &*average_ : nullptr, *splits_.train);
  if (watches_evaluations(config_)) best_.emplace(config_);
  if (best_ && resumed_) resume_best(config_, resumed_->manifest, *saved_, group_, *best_);
  if (!own_.rejoins) return;
  own_.config = config_;
  complete(first_steps());
  report_status({.kind = StatusReport::Kind::kRejoins});
}

// No evaluation was better for as long as --patience says: the run ends with a checkpoint, as if it had been meant
// to.
int Run::give_up(std::int64_t step, Progress& progress, const EvalReport& evaluation) {
  gave_up_ = true;
  take_checkpoint(step, progress);
  finish(progress, evaluation, step);
  return 0;
}

// See Note [Rejoining].
void Run::look_at_survival(const session::Session& session) {
  const std::string why = why_no_survivors(config_, session, ddp_->reducer().comm_hook());
  own_.rejoins = why.empty();
  if (!why.empty() && group_.rank() == 0)
    log_info("--in-place changes nothing for this run: {}; all ranks restart after a failure", why);
}

// Parameters, moments, averages and statistics are those after `step`, and the optimizer counts it or has forgotten it.
void Run::complete(std::int64_t step) {
  if (!own_.rejoins) return;
  own_.step = step;
  own_.position = position_;
  own_.optimizer_steps = step_->optimizer().steps();
  statistics_kept_ = false;
}

// After a failure.
void Run::keep_state() {
  if (statistics_kept_) bad_->take_statistics_back();
  own_.optimizer->set_steps(own_.optimizer_steps);
  own_.buckets = bucket_layout_of(*ddp_);
  // The one of that step is repeated.
  if (best_) own_.evaluations = evaluated_ == own_.step ? best_->history_before() : best_->history();
}

void Run::take_checkpoint(std::int64_t step, Progress& progress) {
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
checkpoint::ExtraState Run::gather_extra_state(int root) {
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
void Run::write_missing_copies() {
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
void Run::report_checkpoints(Progress& progress) {
  while (const auto written = checkpoints_.written()) {
    const CheckpointReport report = report_of(*written);
    reports_.write(report);
    progress.checkpoint(report);
  }
}

// See Note [Rewinding]. The collectives of steps that are under way end on all ranks before anything goes.
void Run::begin_rewind(const Diverged& diverged) {
  while (step_->outcomes_waiting() > 0) step_->take_outcome();
  ddp_->wait_for_parameters();
  finish_checkpoints(checkpoints_, group_);
  checkpoints_.tell_failures();
  bool has_own = false;
  comm::run_collectively(
      group_, [&] { has_own = group_.rank() == 0 && !checkpoint::list_checkpoints(config_.checkpoint_dir).empty(); });
  const RewindReport report{.step = diverged.step, .count = rewinds() + 1, .cause = diverged.cause};
  rewound_ = Rewound{.report = report, .position = position_};
  rewound_->resume = group_.all_gather_numbers(has_own ? 1 : 0).front() != 0 ? "auto" : config_.resume;
  if (group_.rank() == 0)
    log_warn("{}: back to {} with the data that follow, {} of at most {} times", diverged.cause,
             has_own ? "the newest checkpoint" : "where it began", report.count,
             parse_divergence(config_.on_divergence).most);
}

// Someone has asked some rank to stop, and all know.
int Run::leave(std::int64_t step, Progress& progress) {
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

// The numbers are reported before the weights are saved: they stay even if those cannot be written.
void Run::finish(Progress& progress, const EvalReport& evaluation, std::int64_t steps) {
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
                           .rewinds = rewinds(),
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
      throw IoError(reports_.failure(), "free some space and train again if the metrics matter; all else is complete");
  });
  report_status({.kind = StatusReport::Kind::kDone});
}

std::string Run::average_sha256() {
  if (!average_ || group_.rank() != 0) return {};
  const auto in_place = average_->in_place();
  return nn::parameters_sha256(*model_);
}

}  // namespace lockstep::trainer
