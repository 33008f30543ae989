#include "simulate/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace lockstep::simulate {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
constexpr std::size_t kAllInOne = std::size_t{1} << 40;
constexpr std::array kHooks = {"bf16", "fp16", "powersgd:4", "topk:1"};

/// Tries jobs on one cluster.
class Search {
 public:
  Search(std::span<const StepProfile> profiles, const Cluster& cluster, int nodes, const TrialOptions& options)
      : profiles_(profiles), cluster_(cluster), nodes_(nodes), options_(options) {}

  Candidate run(const Job& job) const { return {job, simulate_step(profiles_, job, cluster_, nodes_, options_)}; }
  /// The job with the bucket size that is fastest; as it is, unless another one saves kLeastGain.
  Candidate with_best_buckets(const Job& job) const {
    Candidate best = run(job);
    const double enough = (1 - kLeastGain) * best.prediction.step_ms;
    Candidate fastest = best;
    for (const std::size_t bytes : bucket_sizes()) {
      Job changed = job;
      changed.bucket_bytes = bytes;
      Candidate tried = run(changed);
      if (tried.prediction.step_ms < fastest.prediction.step_ms) fastest = std::move(tried);
    }
    return fastest.prediction.step_ms < enough ? fastest : best;
  }

 private:
  std::span<const StepProfile> profiles_;
  const Cluster& cluster_;
  int nodes_;
  const TrialOptions& options_;
};

std::string reason(const Advice& advice) {
  const auto& best = advice.best.prediction;
  const double share = std::max(0.0, best.exposed_ms) / best.step_ms;
  if (advice.compressed.empty()) return "one rank sends nothing";
  const Candidate& first = advice.compressed.front();
  const double gain = 1 - first.prediction.step_ms / best.step_ms;
  if (gain >= kLeastGainOfCompression)
    return fmt::format(
        "{:.0f} % of a step is communication that backward does not hide, and {} makes steps {:.0f} % "
        "shorter",
        100 * share, first.job.comm_hook, 100 * gain);
  if (share < kLeastGainOfCompression)
    return fmt::format("backward hides communication but for {:.1f} % of a step", 100 * share);
  return fmt::format(
      "{:.0f} % of a step is communication, and compressing costs as much as it saves: {} changes a step "
      "by {:+.1f} %",
      100 * share, first.job.comm_hook, -100 * gain);
}

}  // namespace

std::vector<std::size_t> bucket_sizes() {
  std::vector<std::size_t> sizes;
  for (const std::size_t mib : {1, 2, 4, 8, 16, 25, 32, 64}) sizes.push_back(mib * kMib);
  sizes.push_back(kAllInOne);
  return sizes;
}

Advice advise(std::span<const StepProfile> profiles, const Job& job, const Cluster& cluster, int nodes,
              const TrialOptions& options) {
  const Search search(profiles, cluster, nodes, options);
  Advice advice;
  advice.as_asked = search.run(job);
  advice.best = search.with_best_buckets(job);
  if (advice.as_asked.prediction.ranks > 1) {
    Job exact = job;
    exact.comm_hook = "none";
    exact.zero = 1;
    advice.sharded = search.with_best_buckets(exact);
    const double enough = (1 - kLeastGain) * advice.best.prediction.step_ms;
    if (job.comm_hook == "none" && advice.sharded->prediction.step_ms < enough) advice.best = *advice.sharded;
    exact.zero = 0;
    for (const char* hook : kHooks) {
      exact.comm_hook = hook;
      advice.compressed.push_back(search.with_best_buckets(exact));
    }
    std::ranges::stable_sort(advice.compressed, {}, [](const Candidate& c) { return c.prediction.step_ms; });
    advice.compression_worth =
        advice.compressed.front().prediction.step_ms <= (1 - kLeastGainOfCompression) * advice.best.prediction.step_ms;
  }
  advice.because = reason(advice);

  advice.accumulated = advice.best;
  std::vector<Candidate> more = {advice.best};
  for (const int times : {2, 4, 8}) {
    Job longer = advice.best.job;
    longer.accumulate = job.accumulate * times;
    more.push_back(search.run(longer));
  }
  double most = 0;
  for (const auto& each : more) most = std::max(most, each.prediction.samples_per_s);
  for (const auto& each : more) {
    if (each.prediction.samples_per_s < (1 - kLeastGain) * most) continue;
    advice.accumulated = each;
    break;
  }
  return advice;
}

std::string flags_of(const Job& job, const Job& than) {
  std::string text;
  const auto add = [&](const std::string& flag) { text += (text.empty() ? "" : " ") + flag; };
  if (job.bucket_bytes && job.bucket_bytes != than.bucket_bytes)
    add(*job.bucket_bytes == kAllInOne
            ? "--bucket-mb 1048576"
            : fmt::format("--bucket-mb {:g}", static_cast<double>(*job.bucket_bytes) / kMib));
  if (job.zero != than.zero) add(fmt::format("--zero {}", job.zero));
  if (job.comm_hook != than.comm_hook) add("--comm-hook " + job.comm_hook);
  if (job.accumulate != than.accumulate) add(fmt::format("--accumulate {}", job.accumulate));
  return text;
}

}  // namespace lockstep::simulate
