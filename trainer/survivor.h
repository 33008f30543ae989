// What a rank keeps when it loses others, and how it continues with those that take their places.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Note [Rejoining]
/// Under `lockstep launch --in-place` a rank that loses others (launcher: Note [Survivors]) ends its run and its
/// session, but not its process: data, model, moments, averages and their backend stay. Then it begins a run with them,
/// among ranks of which some are new, as if it resumed from a checkpoint. The checkpoint is in the memory of those
/// ranks that have completed the most steps; the first of them gives it to all that lack it.
///
/// So what a step changes must be whole or as it was: all parameters move at once, after the last bucket's sums
/// (TrainingStep::Options::late), when no rank can be missed any more, and running statistics are taken back to what
/// they were before a step that failed. Ranks that have been lost in a step differ by that step at most, for nobody
/// gets the sums of the next one without them.
struct Survivor {
  /// With what data and weights have added to it.
  std::optional<TrainConfig> config = {};
  std::unique_ptr<nn::Backend> backend = {};  // between sessions; what follows is on it
  data::DataSplits splits = {};
  std::unique_ptr<nn::Module> model = {};
  std::shared_ptr<nn::Optimizer> optimizer = {};
  std::optional<nn::MovingAverage> average = {};

  // As of that state.
  std::int64_t step = -1;  // the last one that is complete; -1: there is no state
  sampler::SamplerState position = {};
  std::int64_t optimizer_steps = 0;
  checkpoint::BucketLayout buckets = {};
  checkpoint::EvaluationHistory evaluations = {};

  StepReport report = {};  // of that step, as this rank has seen it

  bool rejoins = false;  // whether the run that has begun last can be continued so

  /// Nothing is kept any more.
  void clear();
};

/// How often the launcher has started this job again; 0: not yet, or there is no launcher.
int launcher_attempt();
/// Whether the launcher keeps ranks that outlive others; the same on all of them.
bool launcher_keeps_survivors();
/// Whether this process waits for the place of a rank that others outlive.
bool is_spare();
/// Why a run is not continued so, but restarted; empty: it is. The same on all ranks.
std::string why_no_survivors(const TrainConfig& config, const session::Session& session, ddp::CommHook* hook);

/// Collective, before a run has state: what it continues from, if ranks have survived; else nothing. Gives `module` its
/// parameters and buffers where it lacks them. `plan`: of this run's checkpoints.
std::optional<checkpoint::Resumed> resume_from_survivors(Survivor& own, comm::ProcessGroup& group,
                                                         comm::ProcessGroup& gradients,
                                                         const checkpoint::CheckpointManifest& plan,
                                                         nn::Module& module);

/// Whether `error`, which has ended a run, may be another rank's end. Not what is wrong with this rank.
bool may_be_a_loss(const Error& error);
/// Says that this rank is stranded, and waits for its new place, which then is in the environment: called without other
/// threads. False: the launcher ends the job, or somebody does.
bool wait_for_others(const Survivor& own);

}  // namespace lockstep::trainer
