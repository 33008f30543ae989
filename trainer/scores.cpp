#include "trainer/scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "data/class_report.h"
#include "data/table_schema.h"

namespace lockstep::trainer {

std::vector<std::pair<const char*, double>> named_figures(const std::optional<double>& auc,
                                                          const std::optional<ErrorReport>& errors) {
  std::vector<std::pair<const char*, double>> all;
  if (auc) all.emplace_back("auc", *auc);
  if (!errors) return all;
  all.emplace_back("mae", errors->mae);
  all.emplace_back("rmse", errors->rmse);
  if (errors->r2) all.emplace_back("r2", *errors->r2);
  return all;
}

std::vector<std::pair<std::string, double>> all_figures(const EvalReport& report) {
  std::vector<std::pair<std::string, double>> all = {{"loss", report.loss}, {"accuracy", report.accuracy}};
  if (report.top5) all.emplace_back("top5", *report.top5);
  for (const auto& [name, value] : named_figures(report.auc, report.errors)) all.emplace_back(name, value);
  all.insert(all.end(), report.own.begin(), report.own.end());
  return all;
}

JsonObject json_of(const EvalReport& report) {
  JsonObject json = {{"event", "eval"}, {"step", report.step}};
  if (report.epoch > 0) json.add("epoch", report.epoch);
  if (!report.split.empty()) json.add("split", report.split);
  for (const auto& [name, value] : all_figures(report)) json.add(name, value);
  json.add("samples", report.samples);
  if (report.of_average) json.add("ema", true);
  if (report.best) json.add("best", true);
  return json;
}

bool has_errors(const data::Dataset& dataset) { return dataset.has_numeric_targets(); }

bool has_ranking(const data::Dataset& dataset) { return data::has_classes(dataset) && dataset.classes() == 2; }

namespace {

/// What 1 is of the numbers that a model sees.
double unit_of(const data::Dataset& dataset) {
  return dataset.info().table != nullptr ? dataset.info().table->target.deviation : 1;
}

}  // namespace

ErrorSums error_sums(std::span<const float> outputs, std::span<const float> targets) {
  ErrorSums sums{};
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const double target = targets[i], error = double{outputs[i]} - target;
    sums[0] += std::abs(error);
    sums[1] += error * error;
    sums[2] += target;
    sums[3] += target * target;
  }
  return sums;
}

ErrorReport errors_of(const ErrorSums& sums, std::uint64_t samples, const data::Dataset& dataset) {
  const double count = static_cast<double>(samples * dataset.targets_per_sample());
  const double unit = unit_of(dataset);
  ErrorReport report{.mae = unit * sums[0] / count, .rmse = unit * std::sqrt(sums[1] / count)};
  const double spread = sums[3] - sums[2] * sums[2] / count;
  if (dataset.targets_per_sample() == 1 && spread > 0) report.r2 = 1 - sums[1] / spread;
  return report;
}

ErrorQuantiles::ErrorQuantiles(const SampleOutputs& samples, const data::Dataset& dataset) {
  const double unit = unit_of(dataset);
  for (std::size_t i = 0; i < samples.targets.size(); ++i) {
    const double error = unit * (double{samples.outputs[i]} - double{samples.targets[i]});
    mean_ += error / static_cast<double>(samples.targets.size());
    sizes_.push_back(std::abs(error));
  }
  std::ranges::sort(sizes_);
}

double ErrorQuantiles::at(double share) const {
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sizes_.size())));
  return sizes_[std::clamp<std::size_t>(rank, 1, sizes_.size()) - 1];
}

namespace {

constexpr std::pair<const char*, double> kShares[] = {{"p10", 0.1}, {"p25", 0.25}, {"p50", 0.5}, {"p75", 0.75},
                                                      {"p90", 0.9}, {"p99", 0.99}, {"max", 1}};

}  // namespace

std::string ErrorQuantiles::text() const {
  std::string names = fmt::format("{:<10}", "|error|"), values = fmt::format("{:<10}", "");
  for (const auto& [name, share] : kShares) {
    names += fmt::format(" {:>10}", name);
    values += fmt::format(" {:>10.4g}", at(share));
  }
  return fmt::format("{}\n{}\nmean error {:+.4g}", names, values, mean());
}

JsonObject ErrorQuantiles::json() const {
  JsonObject json = {{"event", "errors"}, {"mean", mean()}};
  for (const auto& [name, share] : kShares) json.add(name, at(share));
  return json;
}

void RankedSamples::add(std::span<const float> logits, std::span<const std::int32_t> labels) {
  for (std::size_t i = 0; i < labels.size(); ++i)
    samples_.push_back({.score = logits[2 * i + 1] - logits[2 * i], .label = labels[i]});
}

double RankedSamples::auc(comm::ProcessGroup& group) const {
  auto all = joined<Sample>(group.all_gather_objects(std::as_bytes(std::span(samples_))));
  // The order of equal scores does not matter: they count together.
  std::ranges::sort(all, {}, &Sample::score);
  double first = 0, second = 0, before = 0;  // samples of each class so far; pairs in the right order
  for (std::size_t i = 0; i < all.size();) {
    double ones = 0, zeros = 0;
    const float score = all[i].score;
    for (; i < all.size() && all[i].score == score; ++i) ++(all[i].label == 1 ? ones : zeros);
    before += ones * (first + zeros / 2);
    first += zeros;
    second += ones;
  }
  return first > 0 && second > 0 ? before / (first * second) : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace lockstep::trainer
