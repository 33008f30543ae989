#include "report/bottlenecks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/statistics.h"

namespace lockstep::report {
namespace {

std::string percent(double share) { return fmt::format("{:.0f} %", 100 * share); }
std::string ms(double value) { return fmt::format("{:.3g} ms", value); }

std::string name_of(std::size_t rank, const RankTimes& times) {
  return times.host.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} (host {})", rank, times.host);
}

/// What a step gains in speed if so much of its time goes.
std::string gain(double saved_ms, double step_ms) {
  return fmt::format("up to {} faster", percent(saved_ms / std::max(step_ms - saved_ms, 1e-3 * step_ms)));
}

double computes(const RankTimes& rank) { return std::isnan(rank.compute_ms) ? 0 : rank.compute_ms; }

std::optional<Bottleneck> of_data(const StepFacts& facts) {
  const auto last =
      std::ranges::max_element(facts.ranks, {}, [](const RankTimes& rank) { return rank.data_ms + computes(rank); });
  if (last == facts.ranks.end() || last->data_ms < kLeastShare * facts.step_ms) return std::nullopt;
  const auto rank = static_cast<std::size_t>(last - facts.ranks.begin());
  // The others may be slow to compute: a loader that is never late leaves what they take.
  double computing = 0;
  for (const auto& each : facts.ranks) computing = std::max(computing, computes(each));
  const double saved = std::clamp(last->data_ms + computes(*last) - computing, 0.0, last->data_ms);
  return Bottleneck{
      .cause = Cause::kData,
      .share = last->data_ms / facts.step_ms,
      .text = fmt::format("the loader is late: {} waits {} of each step ({}) for its batch", name_of(rank, *last),
                          ms(last->data_ms), percent(last->data_ms / facts.step_ms)),
      .remedy = fmt::format("--workers {} (now {}), smaller or decoded files, a faster disk: {}",
                            std::max(2, 2 * facts.workers), facts.workers, gain(saved, facts.step_ms))};
}

std::optional<Bottleneck> of_slow_rank(const StepFacts& facts) {
  if (facts.ranks.size() < 2) return std::nullopt;
  const auto slowest = std::ranges::max_element(facts.ranks, {}, computes);
  std::vector<double> others;
  for (auto each = facts.ranks.begin(); each != facts.ranks.end(); ++each)
    if (each != slowest) others.push_back(computes(*each));
  const double usual = median(std::move(others)), excess = computes(*slowest) - usual;
  if (usual <= 0 || excess < kLeastShare * facts.step_ms) return std::nullopt;
  const auto rank = static_cast<std::size_t>(slowest - facts.ranks.begin());
  return Bottleneck{
      .cause = Cause::kSlowRank,
      .share = excess / facts.step_ms,
      .text = fmt::format("{} computes {} longer than the others: {} per step instead of {}", name_of(rank, *slowest),
                          percent(excess / usual), ms(computes(*slowest)), ms(usual)),
      .remedy = fmt::format("look for other programs, clocks and cooling there (lockstep doctor): {}",
                            gain(excess, facts.step_ms))};
}

std::optional<Bottleneck> of_communication(const StepFacts& facts) {
  if (facts.ranks.size() < 2) return std::nullopt;
  const double exposed = facts.exposed_ms.value_or(std::ranges::min(facts.ranks, {}, &RankTimes::wait_ms).wait_ms);
  if (!(exposed >= kLeastShare * facts.step_ms)) return std::nullopt;
  Bottleneck bottleneck = {.cause = Cause::kCommunication, .share = exposed / facts.step_ms};
  bottleneck.text =
      fmt::format("computation does not hide {} of communication ({})", ms(exposed), percent(bottleneck.share));
  double computing = 0;
  for (const auto& rank : facts.ranks) computing = std::max(computing, computes(rank));
  if (!facts.link || !(facts.link->alone_gbs > 0)) {
    bottleneck.remedy =
        fmt::format("--comm-hook bf16, a larger --batch or --accumulate; lockstep bench step MODEL says why: {}",
                    gain(exposed, facts.step_ms));
    return bottleneck;
  }
  const auto& link = *facts.link;
  const double alone_ms = 1e-6 * link.bytes / link.alone_gbs;
  bottleneck.text += fmt::format(
      ": {:.3g} MB of gradients go at {:.3g} GB/s within a step, and at {:.3g} GB/s alone, which "
      "takes {}",
      1e-6 * link.bytes, link.step_gbs, link.alone_gbs, ms(alone_ms));
  // Backward, which can hide it, is about two thirds of computation.
  const double backward = 2.0 / 3 * computing;
  if (alone_ms > backward) {
    bottleneck.text += fmt::format(", longer than backward ({})", ms(backward));
    const double saved = std::min(exposed, facts.compresses ? exposed : alone_ms / 2);
    bottleneck.remedy =
        fmt::format("{}a larger --batch or --accumulate 2, a faster link: {}",
                    facts.compresses ? "" : "--comm-hook bf16 (half the bytes), ", gain(saved, facts.step_ms));
  } else if (link.buckets == 1) {
    bottleneck.text += "; it is one bucket, which is complete when backward ends";
    bottleneck.remedy =
        fmt::format("--bucket-mb {:.2g} (now {:.2g}): {}", std::max(0.1, link.bucket_mb / 4), link.bucket_mb,
                    gain(exposed - alone_ms / 4 > 0 ? exposed - alone_ms / 4 : exposed, facts.step_ms));
  } else {
    bottleneck.text += fmt::format(
        "; buckets become ready too late, or collectives take cores from computing ({} buckets, "
        "the largest of {:.2g} MB)",
        link.buckets, link.bucket_mb);
    bottleneck.remedy =
        fmt::format("--bucket-mb auto, or a core that is left to communication: {}", gain(exposed, facts.step_ms));
  }
  return bottleneck;
}

std::optional<Bottleneck> of_small_batch(const StepFacts& facts) {
  if (!facts.larger_batch || facts.larger_batch->gain < kLeastBatchGain) return std::nullopt;
  const auto& larger = *facts.larger_batch;
  double computing = 0;
  for (const auto& rank : facts.ranks) computing = std::max(computing, computes(rank));
  const double share = (1 - 1 / (1 + larger.gain)) * std::min(1.0, computing / facts.step_ms);
  if (share < kLeastShare) return std::nullopt;
  return Bottleneck{.cause = Cause::kSmallBatch,
                    .share = share,
                    .text = fmt::format(
                        "the batch is small for the device: {} samples of a rank{}", larger.batch,
                        larger.share ? fmt::format(" reach {} of the measured rate of products", percent(*larger.share))
                                     : std::string()),
                    .remedy = fmt::format("--batch {}, with which computation was measured {} faster per sample",
                                          larger.larger, percent(larger.gain))};
}

}  // namespace

std::vector<Bottleneck> bottlenecks_of(const StepFacts& facts) {
  std::vector<Bottleneck> bottlenecks;
  if (!(facts.step_ms > 0)) return bottlenecks;
  for (const auto& find : {of_data, of_slow_rank, of_communication, of_small_batch})
    if (auto found = find(facts)) bottlenecks.push_back(std::move(*found));
  std::ranges::stable_sort(bottlenecks, std::ranges::greater(), &Bottleneck::share);
  return bottlenecks;
}

std::vector<std::string> lines_of(const std::vector<Bottleneck>& bottlenecks, const StepFacts& facts) {
  std::vector<std::string> lines;
  for (const auto& bottleneck : bottlenecks) lines.push_back(bottleneck.text + " → " + bottleneck.remedy);
  if (!lines.empty()) return lines;
  return {fmt::format("nothing holds it up: of {} no cause takes {} or more", ms(facts.step_ms), percent(kLeastShare))};
}

}  // namespace lockstep::report
