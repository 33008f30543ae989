// A run of this process, as a rank of its world.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Runs `config` from start to end as one rank of the world that the environment describes (a world of one without a
/// launcher). Progress goes to stdout on rank 0. Collective: every rank of the world calls it with the same
/// configuration. Returns the exit code 0, or 75 where it was asked to stop and has saved a checkpoint first
/// (config.checkpoint_dir); throws lockstep::Error otherwise.
///
/// Before the program has other threads: SIGINT, SIGTERM, SIGHUP and SIGUSR1 are stop requests from then on, also after
/// it has returned, and the calling thread and those that it starts take no signals that others send. It opens a
/// session, with what that changes of the process (session::open_session()).
///
/// `refusal`: what this rank found wrong with its flags. It is not thrown before the ranks are connected, so that a
/// flag that is wrong on all of them is complained about once.
int train(const TrainConfig& config, const std::optional<UsageError>& refusal = std::nullopt);

/// What a run calls, on every rank, on the thread of train(): what it throws ends the run with that error. A report is
/// the same on all ranks but for times. Between steps of a GPU reports come later than their steps. A step that is left
/// out (TrainConfig::on_bad_batch) has none.
struct TrainHooks {
  std::function<void(const StepReport& report)> on_step = {};
  /// Also of the moving average (EvalReport::of_average); not of `PROGRAM eval`, which trains nothing.
  std::function<void(const EvalReport& report)> on_evaluation = {};
  /// After the last step of each epoch, from 1, and its evaluation.
  std::function<void(std::int64_t epoch)> on_epoch = {};
  /// Of each step, from 0: its learning rate, instead of config.lr and the schedule, which are then left out. A pure
  /// function, so that a run resumes as it was.
  std::function<double(std::int64_t step, std::int64_t total_steps)> learning_rate = {};
  /// Evaluations also have these, --save-best too.
  std::vector<OwnMetric> metrics = {};
};

/// A program's own model, data and loss, to train. Model and loss are also called on a device whose tensors have shapes
/// and no values, to find out what memory they take: they must not look at numbers. What they and the data throw comes
/// out of train(). They are copied into the registries, which keep them until the process ends.
struct OwnTraining {
  /// Builds the model. For a class `Net` with a constructor Net(nn::Context&, …): nn::factory<Net>(…). Called several
  /// times (for shapes, for the device, for copies), on the thread of train(), and builds the same each time. It issues
  /// no collectives.
  nn::Module::Factory model = {};
  data::DataSplits data = {};  // `validation` may be nullptr: nothing is evaluated; `test` is not read
  nn::LossFunction loss = {};  // none: the one that the configuration names; may be called on several threads at once
  std::string name = "model";  // in messages, checkpoints and weight files
  TrainHooks hooks = {};
};

/// train() for a model, data and a loss of the program's own, with all that `lockstep train` has: checkpoints and
/// resuming, metrics, progress, trace, schedules, clipping, evaluation, stop signals. `config` has the settings; model
/// and data are not named in it.
int train(TrainConfig config, const OwnTraining& own);

/// The same for a program whose command line has the flags of `lockstep train`, of which `config` holds the defaults;
/// --help prints them, and 0 is returned:
///
///   int main(int argc, char** argv) {
///     lockstep::trainer::TrainConfig defaults;
///     defaults.lr = 0.01;
///     return lockstep::run_main([&] { return lockstep::train(argc, argv, defaults, {…}); });
///   }
int train(int argc, char** argv, TrainConfig config, const OwnTraining& own);

/// Collective: what `config.weights` make of the data, or of its part `config.split`: each sample once. Prints loss
/// and accuracy (top-1, and top-5 where there are more than five classes; of tokens the perplexity) on rank 0, and
/// writes them to the metrics file. `refusal`: as train() has it. Returns the exit code 0; throws lockstep::Error
/// otherwise. Changes of the process what train() does, and comes before other threads too.
int evaluate(const TrainConfig& config, const std::optional<UsageError>& refusal = std::nullopt);

}  // namespace lockstep::trainer

namespace lockstep {
using trainer::train;
}
