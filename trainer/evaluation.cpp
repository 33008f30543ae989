#include "base/error.h"
#include "lockstep/trainer/train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/stop.h"
#include "comm/agree.h"
#include "lockstep/sampler/slice.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/build.h"
#include "trainer/memory_estimate.h"

namespace lockstep::trainer {
namespace {

std::string text_of(const EvalReport& report, const data::Dataset& dataset) {
  std::string text = fmt::format("{}: loss {:.4f}", dataset.name(), report.loss);
  if (dataset.has_tokens() && dataset.vocabulary() == 0)
    text += fmt::format("  perplexity {:.3f}", std::exp(report.loss));
  if (!std::isnan(report.accuracy)) text += fmt::format("  accuracy {:.2f} %", 100 * report.accuracy);
  if (report.top5) text += fmt::format("  top-5 {:.2f} %", 100 * *report.top5);
  return text + fmt::format("  of {} samples", report.samples);
}

void run(TrainConfig config, session::Session& session) {
  comm::ProcessGroup& group = *session.group;
  data::DataSplits splits;
  std::unique_ptr<nn::Module> model;
  Metrics metrics;
  RunWeights weights;
  session::MemoryNeeds needs;
  const std::int64_t batch = config.batch.value_or(kDefaultBatch);
  comm::run_collectively(group, [&] {
    check_usage(!config.weights.empty(), "eval without weights", "give --weights FILE");
    weights = apply_weights(config);
    splits = open_splits(config, weights.metadata);
    const auto mine = sampler::eval_slice(splits.test->size(), group.rank(), group.size());
    const auto most = static_cast<std::int64_t>(std::min(static_cast<std::uint64_t>(batch), mine.count));
    needs = estimate_memory(config, *session.backend, *splits.test,
                            {.train = false, .samples = most, .workers = config.workers, .batch = most});
  });
  session::check_memory(group, *session.backend, needs);
  comm::run_collectively(group, [&] {
    // The file's tensors go with this statement.
    model = build_model(config, *session.backend, *splits.test, std::exchange(weights, {}));
    if (group.rank() == 0) metrics = Metrics(config.metrics);
  });
  comm::compare_manifests(group, manifest_of(config, *model, *splits.test));
  Evaluator evaluator(group, *session.backend, splits.test, batch, config.workers, dtype_of(config.precision),
                      evaluation_loss(config));
  if (splits.test->classes() > 5) evaluator.count_top5();
  const EvalReport report = evaluator.run(*model, 0);
  metrics.write(report);
  if (group.rank() == 0) std::printf("%s\n", text_of(report, *splits.test).c_str());
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
