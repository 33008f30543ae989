#include "trainer/predictions.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "data/class_report.h"
#include "data/table_file.h"
#include "data/table_schema.h"

namespace lockstep::trainer {
namespace {

constexpr std::size_t kFlushBytes = 1 << 20;

/// One line of the file at a time.
class PredictionLines {
 public:
  PredictionLines(const data::Dataset& dataset, bool csv) : dataset_(dataset), csv_(csv) {
    if (const auto& table = dataset.info().table; table != nullptr && dataset.has_numeric_targets())
      target_ = table->target;
  }

  std::string header() const {
    std::vector<std::string> names = {"sample", "truth", "prediction"};
    if (!dataset_.has_numeric_targets()) names.emplace_back("probability");
    if (lists_classes())
      for (std::int32_t i = 0; i < dataset_.classes(); ++i) names.push_back("probability of " + name_of(i));
    return data::csv_row(names) + "\n";
  }

  std::string line(std::uint64_t sample, std::span<const float> outputs, float truth) {
    const std::string name = dataset_.sample_name(sample);
    if (dataset_.has_numeric_targets()) {
      const double value = in_units(outputs[0]), is = in_units(truth);
      if (csv_) return data::csv_row(std::vector{name, fmt::to_string(is), fmt::to_string(value)}) + "\n";
      return JsonObject{{"sample", name}, {"truth", is}, {"prediction", value}}.text() + "\n";
    }
    take_probabilities(outputs);
    const auto best = static_cast<std::int32_t>(std::ranges::max_element(probabilities_) - probabilities_.begin());
    const std::string is = name_of(static_cast<std::int32_t>(truth)), taken = name_of(best);
    const double probability = probabilities_[static_cast<std::size_t>(best)];
    if (csv_) {
      std::vector<std::string> fields = {name, is, taken, fmt::format("{:.6g}", probability)};
      if (lists_classes())
        for (const double one : probabilities_) fields.push_back(fmt::format("{:.6g}", one));
      return data::csv_row(fields) + "\n";
    }
    JsonObject json = {{"sample", name}, {"truth", is}, {"prediction", taken}, {"probability", probability}};
    if (lists_classes()) json.add("probabilities", probabilities_);
    return json.text() + "\n";
  }

 private:
  bool lists_classes() const { return !dataset_.has_numeric_targets() && dataset_.classes() <= kMostListed; }
  /// To the digits that f32 has.
  double in_units(float value) const {
    return parse_double(fmt::format("{:.7g}", target_.number_of(value))).value_or(value);
  }

  std::string name_of(std::int32_t label) const {
    const auto at = static_cast<std::size_t>(label);
    return at < dataset_.class_names().size() ? dataset_.class_names()[at] : fmt::to_string(label);
  }

  /// Softmax.
  void take_probabilities(std::span<const float> logits) {
    const double largest = *std::ranges::max_element(logits);
    probabilities_.clear();
    double sum = 0;
    for (const float logit : logits) sum += probabilities_.emplace_back(std::exp(double{logit} - largest));
    for (double& probability : probabilities_) probability /= sum;
  }

  const data::Dataset& dataset_;
  bool csv_;
  data::TableColumn target_;  // of other data numbers stay as they are
  std::vector<double> probabilities_;
};

}  // namespace

void check_predictions_path(const std::string& path) {
  if (path.empty() || path.ends_with(".csv") || path.ends_with(".jsonl")) return;
  throw UsageError(fmt::format("--predictions {}: its name says no format", path), "call it .csv or .jsonl");
}

void check_predictable(const data::Dataset& dataset) {
  if (dataset.targets_per_sample() != 1 || !(dataset.has_numeric_targets() || data::has_classes(dataset)))
    throw UsageError(fmt::format("--predictions: samples of {} have no class and no number to predict", dataset.name()),
                     "leave it out");
}

void write_predictions(const std::string& path, const data::Dataset& dataset, const SampleOutputs& samples) {
  const std::size_t each = samples.targets.empty() ? 0 : samples.outputs.size() / samples.targets.size();
  const bool csv = path.ends_with(".csv");
  PredictionLines lines(dataset, csv);
  AtomicFile file(path);
  std::string text = csv ? lines.header() : std::string();
  const auto flush = [&] {
    file.write(std::as_bytes(std::span(text)));
    text.clear();
  };
  for (std::size_t i = 0; i < samples.targets.size(); ++i) {
    text += lines.line(i, std::span(samples.outputs).subspan(i * each, each), samples.targets[i]);
    if (text.size() > kFlushBytes) flush();
  }
  flush();
  file.commit();
}

}  // namespace lockstep::trainer
