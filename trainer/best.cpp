#include "trainer/best.h"

#include <cmath>
#include <utility>

#include "base/error.h"

namespace lockstep::trainer {
namespace {

struct Metric {
  const char* name;
  bool largest;  // is the best
  double (*of)(const EvalReport& report);
};

constexpr Metric kMetrics[] = {
    {"accuracy", true, [](const EvalReport& report) { return report.accuracy; }},
    {"loss", false, [](const EvalReport& report) { return report.loss; }},
    {"perplexity", false, [](const EvalReport& report) { return std::exp(report.loss); }},
};

const Metric* find_metric(const std::string& name) {
  for (const Metric& metric : kMetrics)
    if (name == metric.name) return &metric;
  return nullptr;
}

}  // namespace

void check_needs_no_evaluations(const TrainConfig& config) {
  if (!watches_evaluations(config) && config.eval_steps == 0) return;
  throw UsageError(fmt::format("{}, but {} has no part for validation",
                               !config.save_best.empty() ? "--save-best wants evaluations"
                               : config.patience > 0     ? "--patience wants evaluations"
                                                         : "--eval-steps wants evaluations",
                               config.data),
                   "leave it out, or give data with such a part");
}

BestWatch::BestWatch(const std::string& metric, std::int64_t patience) : patience_(patience) {
  const std::string text = metric.empty() ? "loss" : metric;
  const std::size_t colon = text.find(':');
  metric_ = text.substr(0, colon);
  const std::string way = colon == std::string::npos ? "" : text.substr(colon + 1);
  const Metric* const known = find_metric(metric_);
  if (known == nullptr || (colon != std::string::npos && way != "min" && way != "max"))
    throw UsageError(fmt::format("--save-best {}: evaluations have no such value", metric),
                     "give accuracy, loss or perplexity, also with :min or :max");
  largest_ = way.empty() ? known->largest : way == "max";
}

void BestWatch::restore(const std::optional<BestEvaluation>& best, std::int64_t since) {
  // By another metric nothing is known.
  if (!best || best->metric != metric_) return;
  best_ = best;
  since_ = since;
}

double BestWatch::value_of(const EvalReport& report) const { return find_metric(metric_)->of(report); }

bool BestWatch::follow(const EvalReport& report) {
  const double value = value_of(report);
  const bool better = !std::isnan(value) && (!best_ || (largest_ ? value > best_->value : value < best_->value));
  since_ = better ? 0 : since_ + 1;
  if (better) best_ = {.metric = metric_, .value = value, .step = report.step};
  return better;
}

}  // namespace lockstep::trainer
