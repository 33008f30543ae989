#include "trainer/best.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/settings.h"
#include "lockstep/nn/optim/optimizers.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

struct Metric {
  const char* name;
  bool largest;  // is the best
  double (*of)(const EvalReport& report);
  bool (*is_there)(const data::Dataset& dataset);
};

bool always(const data::Dataset&) { return true; }
bool has_labels(const data::Dataset& dataset) { return !dataset.has_numeric_targets(); }

constexpr Metric kMetrics[] = {
    {"accuracy", true, [](const EvalReport& report) { return report.accuracy; }, has_labels},
    {"auc", true, [](const EvalReport& report) { return report.auc.value_or(std::nan("")); }, has_ranking},
    {"loss", false, [](const EvalReport& report) { return report.loss; }, always},
    {"mae", false, [](const EvalReport& report) { return report.errors ? report.errors->mae : std::nan(""); },
     has_errors},
    {"perplexity", false, [](const EvalReport& report) { return std::exp(report.loss); }, has_labels},
    {"r2", true,
     [](const EvalReport& report) { return report.errors ? report.errors->r2.value_or(std::nan("")) : std::nan(""); },
     has_errors},
    {"rmse", false, [](const EvalReport& report) { return report.errors ? report.errors->rmse : std::nan(""); },
     has_errors},
};

const Metric* find_metric(const std::string& name) {
  for (const Metric& metric : kMetrics)
    if (name == metric.name) return &metric;
  return nullptr;
}

std::vector<OwnMetric>& metrics_of_program() {
  static std::vector<OwnMetric> metrics;
  return metrics;
}

const OwnMetric* find_own(const std::string& name) {
  const auto found = std::ranges::find(own_metrics(), name, &OwnMetric::name);
  return found != own_metrics().end() ? &*found : nullptr;
}

}  // namespace

const std::vector<OwnMetric>& own_metrics() { return metrics_of_program(); }

void set_own_metrics(std::vector<OwnMetric> metrics) {
  std::set<std::string> names = {"event", "step", "samples", "top5",         "ema",
                                 "best",  "data", "of",      "bits_per_byte"};  // of reports
  for (const Metric& metric : kMetrics) names.insert(metric.name);
  for (const OwnMetric& metric : metrics) {
    check_family_name("metric", metric.name);
    if (!names.insert(metric.name).second) throw_second("metric", metric.name);
    if (metric.sums < 1 || metric.add == nullptr || metric.value == nullptr)
      throw UsageError(fmt::format("a metric '{}' without sums, or without a function", metric.name),
                       "give OwnMetric at least one sum, add and value");
  }
  metrics_of_program() = std::move(metrics);
}

bool watches_evaluations(const TrainConfig& config) {
  return !config.save_best.empty() || config.patience > 0 || config.keep_best > 0 ||
         nn::schedule_family(config.schedule).follows_evaluations;
}

void check_needs_no_evaluations(const TrainConfig& config) {
  if (!watches_evaluations(config) && config.eval_steps == 0) return;
  throw UsageError(fmt::format("{}, but {} has no part for validation",
                               !config.save_best.empty() ? "--save-best wants evaluations"
                               : config.patience > 0     ? "--patience wants evaluations"
                               : config.keep_best > 0    ? "--keep-best wants evaluations"
                               : config.eval_steps > 0   ? "--eval-steps wants evaluations"
                                                         : "--schedule " + config.schedule + " wants evaluations",
                               config.data),
                   "leave it out, or give data with such a part");
}

void check_metric(const TrainConfig& config, const data::Dataset& dataset) {
  if (config.save_best.empty()) return;
  const std::string name = config.save_best.substr(0, config.save_best.find(':'));
  const Metric* const metric = find_own(name) != nullptr ? nullptr : find_metric(name);
  if (metric == nullptr || metric->is_there(dataset)) return;  // BestWatch refuses another name
  std::vector<std::string> others;
  for (const Metric& other : kMetrics)
    if (other.is_there(dataset)) others.emplace_back(other.name);
  throw UsageError(
      fmt::format("--save-best {}: evaluations on {} have no {}", config.save_best, dataset.name(), metric->name),
      fmt::format("give {}", listed(others, "or")));
}

std::vector<std::string> metric_names() {
  std::vector<std::string> all;
  for (const Metric& metric : kMetrics) all.emplace_back(metric.name);
  for (const OwnMetric& metric : own_metrics()) all.push_back(metric.name);
  return all;
}

double value_in(const EvalReport& report, const std::string& metric) {
  for (const auto& [name, value] : report.own)
    if (name == metric) return value;
  const Metric* const known = find_metric(metric);
  return known != nullptr ? known->of(report) : std::nan("");
}

std::string describe(const std::vector<BestEvaluation>& evaluations) {
  std::vector<std::string> all;
  for (const auto& one : evaluations)
    all.push_back(fmt::format("step {} ({} {:.6g})", one.step, one.metric, one.value));
  return all.empty() ? "none" : join(all, ", ");
}

BestWatch::BestWatch(const TrainConfig& config) : patience_(config.patience), keep_best_(config.keep_best) {
  const std::string text = config.save_best.empty() ? "loss" : config.save_best;
  const std::size_t colon = text.find(':');
  metric_ = text.substr(0, colon);
  const std::string way = colon == std::string::npos ? "" : text.substr(colon + 1);
  const Metric* const known = find_metric(metric_);
  const OwnMetric* const of_program = find_own(metric_);
  if ((known == nullptr && of_program == nullptr) || (colon != std::string::npos && way != "min" && way != "max"))
    throw UsageError(fmt::format("--save-best {}: evaluations have no such value", config.save_best),
                     fmt::format("give {}, also with :min or :max", listed(metric_names(), "or")));
  largest_ = !way.empty() ? way == "max" : of_program != nullptr ? of_program->largest_is_best : known->largest;
  if (!nn::schedule_family(config.schedule).follows_evaluations) return;
  const Settings settings = schedule_settings_of(config);
  plateau_patience_ = settings.integer(nn::kPlateauPatience);
  plateau_threshold_ = settings.number(nn::kPlateauThreshold);
}

void BestWatch::restore(const EvaluationHistory& history) {
  history_ = history;
  before_ = history;
  // By another metric nothing is known.
  std::erase_if(history_.kept, [this](const BestEvaluation& one) { return one.metric != metric_; });
  if (history.best && history.best->metric != metric_) forget_best();
}

bool BestWatch::follow(const EvalReport& report) {
  before_ = history_;
  if (plateau_patience_) follow_loss(report.loss);
  const double value = value_in(report, metric_);
  const auto& best = history_.best;
  const bool better = !std::isnan(value) && (!best || is_better(value, best->value));
  history_.since_best = better ? 0 : history_.since_best + 1;
  if (better) history_.best = {.metric = metric_, .value = value, .step = report.step};
  if (!std::isnan(value)) keep({.metric = metric_, .value = value, .step = report.step});
  return better;
}

// Of equal ones the older.
void BestWatch::keep(BestEvaluation evaluation) {
  auto& kept = history_.kept;
  const auto worse =
      std::ranges::find_if(kept, [&](const BestEvaluation& other) { return is_better(evaluation.value, other.value); });
  kept.insert(worse, std::move(evaluation));
  if (std::ssize(kept) > keep_best_) kept.resize(static_cast<std::size_t>(keep_best_));
}

// As PyTorch's ReduceLROnPlateau does it, with its defaults of a relative threshold and no pause afterwards.
void BestWatch::follow_loss(double loss) {
  EvaluationHistory& h = history_;
  if (!std::isnan(loss) && (!h.least_loss || loss < *h.least_loss * (1 - plateau_threshold_))) {
    h.least_loss = loss;
    h.since_least = 0;
  } else if (++h.since_least > *plateau_patience_) {
    ++h.reductions;
    h.since_least = 0;
  }
}

}  // namespace lockstep::trainer
