// For which class samples of each class are taken, and the figures that follow.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"

namespace lockstep::trainer {

/// Counts (classes, classes): in row r and column c the samples of class r that are taken for class c.
class Confusion {
 public:
  explicit Confusion(std::int64_t classes) : classes_(classes), counts_(static_cast<std::size_t>(classes * classes)) {}
  /// EvalReport::confusion.
  explicit Confusion(std::vector<std::int64_t> counts);

  /// `logits` (labels.size(), classes): of equal ones the first counts. A label beyond the classes is no sample.
  void count(std::span<const float> logits, std::span<const std::int32_t> labels);

  std::int64_t classes() const { return classes_; }
  std::span<std::int64_t> counts() { return counts_; }
  std::int64_t at(std::int64_t label, std::int64_t taken) const {
    return counts_[static_cast<std::size_t>(label * classes_ + taken)];
  }

  /// Of one class. NaN where there is nothing to divide by.
  struct Figures {
    double precision = 0;      // of what is taken for it, what is of it
    double recall = 0;         // of what is of it, what is taken for it
    double f1 = 0;             // their harmonic mean
    std::int64_t support = 0;  // samples of it
  };
  Figures figures_of(std::int64_t label) const;
  /// The mean over classes that have samples or are taken for some, as scikit-learn's classification_report has it;
  /// what is not a number counts as 0.
  Figures mean() const;

 private:
  std::int64_t classes_;
  std::vector<std::int64_t> counts_;
};

/// A line for each class, their mean, and, of a few classes, the counts. `names`: of the first classes.
std::string table_of(const Confusion& confusion, const std::vector<std::string>& names);
/// The same as an event: {"event": "classes", "classes": [{"name", "precision", "recall", "f1", "support"}, …],
/// "macro": {…}, "confusion": [[…], …]}.
JsonObject json_of(const Confusion& confusion, const std::vector<std::string>& names);

}  // namespace lockstep::trainer
