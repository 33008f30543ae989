// Where the reports of a run go while it trains, on rank 0. What they are is in lockstep/trainer/metrics.h.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoints.h"
#include "lockstep/base/deadline.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// What parameters and gradients are, after a step's update.
struct TensorReport {
  std::int64_t step = 0;
  nn::Backend& backend;
  std::span<const nn::NamedParameter> parameters;
};

/// One of those who follow a run. It never holds up training and never ends it: what it cannot do is one warning, and
/// failure() says it. Called by the training thread.
class Follower {
 public:
  virtual ~Follower() = default;
  virtual void write(const RunReport& /*report*/) {}
  virtual void write(const ResumeReport& /*report*/) {}
  virtual void write(const RestartReport& /*report*/) {}
  virtual void write(const RewindReport& /*report*/) {}
  virtual void write(const data::DataSplits& /*splits*/) {}
  virtual void write(const StepReport& /*report*/) {}
  /// Comes after the StepReport of its step.
  virtual void write(const TensorReport& /*report*/) {}
  virtual void write(const EvalReport& /*report*/) {}
  virtual void write(const CheckpointReport& /*report*/) {}
  virtual void write(const BalanceReport& /*report*/) {}
  virtual void write(const SkippedReport& /*report*/) {}
  virtual void write(const FinalReport& /*report*/) {}
  /// A checkpoint is taken: what was written is on record before it is.
  virtual void flush() {}
  /// Of a run that resumes: the last step that it has on record.
  virtual std::int64_t last_step() const { return std::numeric_limits<std::int64_t>::max(); }
  /// Says that it lacks steps up to `step`, if so.
  virtual void look_for_gap(std::int64_t /*step*/, bool /*restarted*/) {}
  /// Empty, or what it lacks.
  virtual std::string failure() const { return {}; }
};

/// Whether anyone is to follow the run that is configured.
bool follows_run(const TrainConfig& config);

class Reports {
 public:
  Reports() = default;
  /// Those that the configuration names, with all that comes before the first step. `last`, if not nullptr: of the step
  /// after which the run resumes, for those that do not have it, since whoever was to write it is gone. `rewound`,
  /// likewise: it begins after divergence. Throws UsageError and IoError for what cannot be written.
  Reports(const TrainConfig& config, const RunReport& run, const std::optional<checkpoint::Resumed>& resumed,
          const data::DataSplits& splits, const StepReport* last, const RewindReport* rewound);

  explicit operator bool() const { return !followers_.empty(); }
  void write(const auto& report) {
    for (const auto& follower : followers_) follower->write(report);
  }
  void flush() {
    for (const auto& follower : followers_) follower->flush();
  }
  /// Of the first that has one.
  std::string failure() const;

  /// What this rank holds in memory, as StepReport has it. Looks every 0.1 s: steps may be shorter than a look.
  std::int64_t memory_bytes(nn::Backend& backend, Clock::time_point now);

 private:
  std::vector<std::unique_ptr<Follower>> followers_;
  Clock::time_point next_look_{};
  std::int64_t memory_bytes_ = 0;
};

/// Since 1970.
double unix_seconds();

CheckpointReport report_of(const checkpoint::Checkpoints::Written& written);

}  // namespace lockstep::trainer
