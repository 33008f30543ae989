// Which evaluation of a run is the best so far, and when to give up waiting for a better one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "lockstep/checkpoint/options.h"
#include "lockstep/data/dataset.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

using checkpoint::BestEvaluation;
using checkpoint::EvaluationHistory;

/// Whether evaluations decide anything.
bool watches_evaluations(const TrainConfig& config);

/// Throws UsageError where they would, or come after so many steps: the data have no part for them.
void check_needs_no_evaluations(const TrainConfig& config);

/// Throws UsageError where evaluations on these data have no such metric.
void check_metric(const TrainConfig& config, const data::Dataset& dataset);

/// The same on all ranks, since evaluations are.
std::vector<std::string> metric_names();

/// One of metric_names(), of an evaluation; NaN: it has none.
double value_in(const EvalReport& report, const std::string& metric);

/// A program's own metrics, of its last OwnTraining: evaluations have them, and --save-best knows them.
const std::vector<OwnMetric>& own_metrics();
/// Throws UsageError for a name that cannot be typed, or is another one's, and without functions or sums.
void set_own_metrics(std::vector<OwnMetric> metrics);

/// "step 40 (accuracy 0.98), step 60 (accuracy 0.97)".
std::string describe(const std::vector<BestEvaluation>& evaluations);

class BestWatch {
 public:
  /// Of --save-best, one of metric_names(), also with ":max" or ":min" (else the loss); --patience; --keep-best; and a
  /// schedule that follows evaluations. Throws UsageError for another metric.
  explicit BestWatch(const TrainConfig& config);

  /// What was known when a checkpoint was taken.
  void restore(const EvaluationHistory& history);
  /// Of another file than the best ones': nothing is the best so far.
  void forget_best() {
    history_.best.reset();
    history_.since_best = 0;
    before_ = history_;
  }
  /// Whether it is better than all before, the first of equal ones. One without a value is not.
  bool follow(const EvalReport& report);

  const EvaluationHistory& history() const { return history_; }
  /// As it was before the last evaluation.
  const EvaluationHistory& history_before() const { return before_; }
  bool gives_up() const { return patience_ > 0 && history_.since_best >= patience_; }

 private:
  bool is_better(double value, double than) const { return largest_ ? value > than : value < than; }
  void keep(BestEvaluation evaluation);
  void follow_loss(double loss);

  std::string metric_;
  bool largest_ = false;
  std::int64_t patience_, keep_best_;
  std::optional<std::int64_t> plateau_patience_ = {};  // nothing: the schedule does not follow evaluations
  double plateau_threshold_ = 0;
  EvaluationHistory history_, before_;
};

}  // namespace lockstep::trainer
