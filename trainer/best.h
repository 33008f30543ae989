// Which evaluation of a run is the best so far, and when to give up waiting for a better one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/options.h"
#include "lockstep/data/dataset.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

using checkpoint::BestEvaluation;

/// Whether evaluations decide anything.
inline bool watches_evaluations(const TrainConfig& config) { return !config.save_best.empty() || config.patience > 0; }

/// Throws UsageError where they would, or come after so many steps: the data have no part for them.
void check_needs_no_evaluations(const TrainConfig& config);

/// Throws UsageError where evaluations on these data have no such metric.
void check_metric(const TrainConfig& config, const data::Dataset& dataset);

/// The same on all ranks, since evaluations are.
std::vector<std::string> metric_names();

/// A program's own metrics, of its last OwnTraining: evaluations have them, and --save-best knows them.
const std::vector<OwnMetric>& own_metrics();
/// Throws UsageError for a name that cannot be typed, or is another one's, and without functions or sums.
void set_own_metrics(std::vector<OwnMetric> metrics);

class BestWatch {
 public:
  /// `metric`: one of metric_names(), also with ":max" or ":min"; empty: the loss. Throws UsageError for another one.
  /// `patience`: 0: it never gives up.
  BestWatch(const std::string& metric, std::int64_t patience);

  /// What was known when a checkpoint was taken.
  void restore(const std::optional<BestEvaluation>& best, std::int64_t since);
  /// Whether it is better than all before. One without a value is not.
  bool follow(const EvalReport& report);

  const std::optional<BestEvaluation>& best() const { return best_; }
  /// Evaluations after it.
  std::int64_t since() const { return since_; }
  bool gives_up() const { return patience_ > 0 && since_ >= patience_; }

 private:
  double value_of(const EvalReport& report) const;

  std::string metric_;
  bool largest_ = false;
  std::int64_t patience_, since_ = 0;
  std::optional<BestEvaluation> best_;
};

}  // namespace lockstep::trainer
