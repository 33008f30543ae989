// Figures of an evaluation that need what the model returned, and not its loss alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// The event of an evaluation, with the figures that it has.
JsonObject json_of(const EvalReport& report);

/// All figures of an evaluation, by their names in files; NaN: it has none.
std::vector<std::pair<std::string, double>> all_figures(const EvalReport& report);

/// Those that are there of some, likewise.
std::vector<std::pair<const char*, double>> named_figures(const std::optional<double>& auc,
                                                          const std::optional<ErrorReport>& errors);

/// What ranks have gathered (ProcessGroup::gather_objects), one after the other.
template <class T>
std::vector<T> joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<T> all;
  for (const auto& bytes : parts) {
    const std::size_t before = all.size();
    all.resize(before + bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(all.data() + before, bytes.data(), bytes.size());
  }
  return all;
}

/// Whether an evaluation on `dataset` has errors (of numbers), or a ranking (of two classes).
bool has_errors(const data::Dataset& dataset);
bool has_ranking(const data::Dataset& dataset);

/// Of some targets that are numbers: |error|, error², target, target².
using ErrorSums = std::array<double, 4>;
/// `outputs` and `targets` are of one length.
ErrorSums error_sums(std::span<const float> outputs, std::span<const float> targets);
/// In the units of the data: of a table, those of its target, which the model sees standardised.
ErrorReport errors_of(const ErrorSums& sums, std::uint64_t samples, const data::Dataset& dataset);

/// How large errors are, in the units of the data: a share p of all |errors| is at most at(p).
class ErrorQuantiles {
 public:
  /// Of samples with one number each, of which there are some.
  ErrorQuantiles(const SampleOutputs& samples, const data::Dataset& dataset);
  double at(double share) const;
  /// Of the errors with their signs: outputs less targets.
  double mean() const { return mean_; }

  std::string text() const;
  JsonObject json() const;

 private:
  std::vector<double> sizes_;  // in ascending order
  double mean_ = 0;
};

/// By how much each sample is rather of the second class, and whether it is.
class RankedSamples {
 public:
  /// `logits` (labels.size(), 2).
  void add(std::span<const float> logits, std::span<const std::int32_t> labels);
  /// Collective: the area under the ROC curve of all ranks' samples: how likely one of the second class is ranked
  /// before one of the first, where ties count half (Hanley and McNeil, 1982). NaN without samples of both.
  double auc(comm::ProcessGroup& group) const;

 private:
  struct Sample {
    float score = 0;
    std::int32_t label = 0;
  };
  std::vector<Sample> samples_;
};

}  // namespace lockstep::trainer
