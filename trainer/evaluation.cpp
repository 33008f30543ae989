#include "base/error.h"
#include "lockstep/trainer/train.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>
#include <utility>

#include "base/signals.h"
#include "base/text.h"
#include "comm/agree.h"
#include "lockstep/sampler/slice.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"
#include "session/saved_file.h"
#include "trainer/best.h"
#include "trainer/build.h"
#include "trainer/confusion.h"
#include "trainer/memory_estimate.h"
#include "trainer/predictions.h"
#include "trainer/progress_text.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

/// What is evaluated on, and how many samples its source has in all parts that were opened.
struct Evaluated {
  std::shared_ptr<const data::Dataset> dataset;
  std::uint64_t of = 0;
};

Evaluated choose_samples(const TrainConfig& config, const std::optional<checkpoint::ModelMetadata>& metadata) {
  const bool all = config.split == kSplitAll, by_default = config.split.empty();
  data::Parts parts{.whole = all || by_default, .test = all || config.split == kSplitTest};
  if (metadata) parts.class_names = metadata->class_names;
  const data::DataSplits splits = open_splits(config, metadata, parts);
  if (splits.whole != nullptr) return {splits.whole, splits.whole->size()};
  std::vector<std::shared_ptr<const data::Dataset>> there;
  std::uint64_t count = 0;
  for (const auto& part : {splits.train, splits.validation, splits.test == splits.validation ? nullptr : splits.test}) {
    if (part == nullptr) continue;
    there.push_back(part);
    count += part->size();
  }
  if (all) return {data::concatenate(std::move(there), config.data), count};
  const auto& part = config.split == kSplitTrain  ? splits.train
                     : config.split == kSplitTest ? splits.test
                                                  : splits.validation;
  if (part == nullptr)
    throw UsageError(fmt::format("{} has no part for --split {}", config.data,
                                 by_default ? std::string(kSplitValidation) : config.split),
                     config.split == kSplitTest ? "name the test data as --data: all of data without parts is measured"
                                                : "leave --split out");
  return {part, count};
}

/// Of a text whose tokens are predicted one after the other, all of them: what a byte of it takes, on the average.
std::optional<double> bits_per_byte(const TrainConfig& config, const EvalReport& report, const data::Dataset& dataset) {
  const double bytes = dataset.info().bytes_per_token;
  if (bytes == 0 || ignored_label_of(config) || dataset.vocabulary() != 0) return std::nullopt;
  return report.loss / std::numbers::ln2 / bytes;
}

std::string text_of(const TrainConfig& config, const EvalReport& report, const Evaluated& evaluated) {
  const data::Dataset& dataset = *evaluated.dataset;
  std::string text = fmt::format("{}: loss {:.4f}", dataset.name(), report.loss);
  if (dataset.has_tokens() && dataset.vocabulary() == 0)
    text += fmt::format("  perplexity {:.3f}", std::exp(report.loss));
  if (const auto bits = bits_per_byte(config, report, dataset)) text += fmt::format("  bits per byte {:.4f}", *bits);
  return text + figures_of(report) + fmt::format("  {} of {} samples", report.samples, evaluated.of);
}

void print(const std::string& line) {
  if (std::printf("%s\n", line.c_str()) < 0 || std::fflush(stdout) != 0)
    throw IoError(fmt::format("standard output: {}", errno_text(errno)), "the evaluation is complete, and not shown");
}

void run(TrainConfig config, session::Session& session) {
  comm::ProcessGroup& group = *session.group;
  Evaluated evaluated;
  std::unique_ptr<nn::Module> model;
  Metrics metrics;
  RunWeights weights;
  session::MemoryNeeds needs;
  const std::int64_t batch = config.batch.value_or(kDefaultBatch);
  comm::run_collectively(group, [&] {
    check_usage(!config.weights.empty(), "eval without weights", "give --weights FILE");
    weights = apply_weights(config);
    evaluated = choose_samples(config, weights.metadata);
    apply_targets(config, *evaluated.dataset);
    if (!config.predictions.empty()) check_predictable(*evaluated.dataset);
    const auto mine = sampler::eval_slice(evaluated.dataset->size(), group.rank(), group.size());
    const auto most = static_cast<std::int64_t>(std::min(static_cast<std::uint64_t>(batch), mine.count));
    needs = estimate_memory(config, *session.backend, *evaluated.dataset,
                            {.train = false, .samples = most, .workers = config.workers, .batch = most});
  });
  session::check_memory(group, *session.backend, needs);
  const data::Dataset& dataset = *evaluated.dataset;
  comm::run_collectively(group, [&] {
    // The file's tensors go with this statement.
    model = build_model(config, *session.backend, dataset, std::exchange(weights, {}));
    if (group.rank() == 0) metrics = Metrics(config.metrics);
  });
  comm::compare_manifests(group, manifest_of(config, *model, dataset, session.threads));
  Evaluator evaluator(group, *session.backend, evaluated.dataset, batch, config.workers, dtype_of(config.precision),
                      evaluation_loss(config));
  if (dataset.classes() > 5) evaluator.count_top5();
  if (measures_outputs(config)) evaluator.measure();
  evaluator.add_metrics(own_metrics());
  evaluator.ignore(ignored_label_of(config));
  const bool of_errors = config.report && dataset.has_numeric_targets() && dataset.targets_per_sample() == 1;
  if (config.report && !of_errors) comm::run_collectively(group, [&] { evaluator.count_confusion(); });
  if (of_errors || !config.predictions.empty()) evaluator.keep_outputs();
  const EvalReport report = evaluator.run(*model, 0);
  comm::run_collectively(group, [&] {
    if (group.rank() == 0) {
      metrics.write(data::DataSplits{.whole = evaluated.dataset});
      metrics.write(report);
      JsonObject json = json_of(report).add("data", dataset.name()).add("of", evaluated.of);
      if (const auto bits = bits_per_byte(config, report, dataset)) json.add("bits_per_byte", *bits);
      print(config.json ? json.text() : text_of(config, report, evaluated));
      if (of_errors) {
        const ErrorQuantiles errors(evaluator.outputs(), dataset);
        print(config.json ? errors.json().text() : errors.text());
      } else if (config.report) {
        metrics.write_classes(report, dataset.class_names());
        const Confusion confusion(report.confusion);
        print(config.json ? json_of(confusion, dataset.class_names()).text()
                          : table_of(confusion, dataset.class_names()));
      }
      if (!config.predictions.empty()) {
        const auto begun = Clock::now();
        write_predictions(config.predictions, dataset, evaluator.outputs());
        if (!config.json) print(describe(session::saved_file(config.predictions, begun)));
      }
      if (!metrics.failure().empty())
        throw IoError(metrics.failure(), "free some space and evaluate again if the metrics matter");
      if (!std::isfinite(report.loss))
        throw DivergedError(fmt::format("the evaluation loss of {} is {}", config.weights,
                                        std::isnan(report.loss) ? "NaN" : "infinite"),
                            "use weights of a training that did not diverge, or look at the data");
    }
  });
}

}  // namespace

int evaluate(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  session::Session session = open_session(config, refusal);
  run(config, session);
  session.shutdown();
  return 0;
}

}  // namespace lockstep::trainer
