// One run: what it is made of, its loop over steps, and its end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoints.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/parallel/model_averaging.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/train.h"
#include "trainer/audit.h"
#include "trainer/bad_batches.h"
#include "trainer/best.h"
#include "trainer/build.h"
#include "trainer/carried_state.h"
#include "trainer/checkpoint_parts.h"
#include "trainer/divergence.h"
#include "trainer/progress.h"
#include "trainer/reports.h"
#include "trainer/resume.h"
#include "trainer/saved_weights.h"
#include "trainer/step.h"
#include "trainer/step_graphs.h"
#include "trainer/step_shares.h"
#include "trainer/stragglers.h"
#include "trainer/survivor.h"
#include "trainer/trace.h"

namespace lockstep::trainer {

/// Made, executed once, and gone before its session. One thread uses it.
class Run {
 public:
  /// What `own` has from a run before stays (Note [Rejoining]); the session's backend is its then.
  /// `rewound`: the run before in this session has diverged (Note [Rewinding]).
  struct Rewound {
    RewindReport report = {};
    sampler::SamplerState position = {};  // with which data it continues
    std::string resume = {};              // and from where: TrainConfig::resume
  };
  Run(const TrainConfig& config, session::Session& session, const TrainHooks& hooks, Survivor& own,
      const std::optional<Rewound>& rewound);
  /// The exit code; nothing: it has diverged and is to go back, as rewound() says.
  std::optional<int> execute();
  const std::optional<Rewound>& rewound() const { return rewound_; }

 private:
  void begin_rewind(const Diverged& diverged);
  int train_and_report();
  int give_up(std::int64_t step, Progress& progress, const EvalReport& evaluation);
  void look_at_survival(const session::Session& session);
  void complete(std::int64_t step);
  void keep_state();
  // Ranks take steps alone (parallel: Note [Local SGD]).
  bool averages() const { return config_.local_sgd > 0; }
  void average(std::int64_t step);
  std::int64_t rewinds() const { return rewound_ ? rewound_->report.count : 0; }
  std::int64_t first_steps() const { return resumed_ ? resumed_->manifest.step : 0; }
  bool evaluation_due(std::int64_t step, std::uint64_t epoch) const;
  bool checkpoint_due(std::int64_t step, bool last_of_epoch, bool evaluates) const;
  void check_replicas(std::int64_t step);
  void take_checkpoint(std::int64_t step, Progress& progress);
  checkpoint::ExtraState gather_extra_state(int root);
  void write_missing_copies();
  void report_checkpoints(Progress& progress);
  int leave(std::int64_t step, Progress& progress);
  /// What batches go through: the model, or what shares them out to several.
  nn::Module& forwarded() { return data_parallel_ ? data_parallel_->module() : *model_; }
  void leave_out(const SkippedReport& report);
  void report_shares(const BalanceReport& report);
  void follow_shares(std::int64_t step);
  Trace* trace() { return trace_ ? &*trace_ : nullptr; }
  const data::Batch& next_batch();
  void begin_step(std::int64_t step, const data::Batch& batch, bool checkpoint);
  void tell_launcher(double step_seconds, Clock::time_point now);
  void report_step(Progress& progress);
  bool evaluate(std::optional<Evaluator>& evaluator, std::int64_t step, std::uint64_t epochs_done, Progress& progress,
                EvalReport& report);
  std::int64_t epochs_of(std::int64_t steps) const { return (steps - 1) / steps_per_epoch_ + 1; }  // begun
  void finish(Progress& progress, const EvalReport& evaluation, std::int64_t steps);
  std::string average_sha256();

  Survivor& own_;
  TrainConfig config_;
  const TrainHooks& hooks_;
  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  Clock::time_point start_ = Clock::now();
  data::DataSplits& splits_ = own_.splits;
  std::unique_ptr<nn::Module>& model_ = own_.model;
  std::unique_ptr<DataParallelModel> data_parallel_;  // nullptr: this process computes on one device
  std::optional<StepShares> shares_;
  Reports reports_;  // rank 0's
  std::int64_t steps_per_epoch_ = 0, total_steps_ = 0;
  std::optional<Trace> trace_;
  std::optional<checkpoint::Resumed> resumed_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<parallel::ModelAverager> averager_;  // nothing: gradients are summed
  std::optional<nn::MovingAverage>& average_ = own_.average;
  std::optional<CarriedState> carried_;
  std::unique_ptr<nn::GradScaler> scaler_;  // nullptr: losses are not scaled
  std::optional<DivergenceWatch> divergence_;
  std::optional<Rewound> rewound_;  // of the run before, and then of this one
  std::optional<StepGraphs> graphs_;
  std::optional<TrainingStep> step_;
  std::optional<Mirror> mirror_;
  std::optional<SeenDirectory> seen_;    // nothing: no checkpoints in parts are wanted
  checkpoint::Checkpoints checkpoints_;  // its thread only has what it was given
  sampler::SamplerState position_;       // after the last step that has begun
  bool statistics_kept_ = false;         // before the step under way
  std::int64_t evaluated_ = -1;          // the step whose evaluation best_ has followed last
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

}  // namespace lockstep::trainer
