// "Why is it slow?" in words, from what was measured of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::report {

/// Note [Bottlenecks]
/// The ranks of a step wait for the one that is ready last. A step takes longer than computation must by three times:
/// its wait for data, its computation beyond that of the others, and even its wait for collectives. A cause is named
/// where it takes at least kLeastShare of the step; a batch is called small only where a larger one was tried and
/// computed kLeastBatchGain more samples a second. So a healthy step has no bottleneck. The gain of a remedy is an
/// upper bound: it cannot be more than its cause takes.
inline constexpr double kLeastShare = 0.1;
inline constexpr double kLeastBatchGain = 0.15;

/// Of a rank and a step, in ms.
struct RankTimes {
  std::string host = {};
  double data_ms = 0;     // it waits for its batch
  double compute_ms = 0;  // NaN: a device computes, and the host does not know
  double wait_ms = 0;     // it waits for collectives
};

struct StepFacts {
  double step_ms = 0;
  std::vector<RankTimes> ranks = {};
  int workers = 1;          // that load data on each rank
  bool compresses = false;  // a communication hook already does
  /// Collectives that computation does not hide; default: what the rank that waits least waits.
  std::optional<double> exposed_ms = {};
  struct Link {
    double bytes = 0;      // of gradients in a step
    double step_gbs = 0;   // 10⁹ bytes a second that collectives reduce within the step …
    double alone_gbs = 0;  // … and with nothing beside
    std::size_t buckets = 0;
    double bucket_mb = 0;  // the largest
  };
  std::optional<Link> link = {};
  struct LargerBatch {
    std::int64_t batch = 0, larger = 0;  // samples of a rank
    double gain = 0;                     // in samples a second of computation; 0.5: half as many again
    std::optional<double> share = {};    // of the measured rate of products that the step reaches
  };
  std::optional<LargerBatch> larger_batch = {};
};

enum class Cause : std::uint8_t { kData, kSlowRank, kCommunication, kSmallBatch };

struct Bottleneck {
  Cause cause = Cause::kData;
  double share = 0;         // of the step
  std::string text = {};    // what, with numbers
  std::string remedy = {};  // what to try, and what it may gain
};

/// Those that hold, the costliest first. Pure.
std::vector<Bottleneck> bottlenecks_of(const StepFacts& facts);

/// A line each, or one that says that nothing is wrong.
std::vector<std::string> lines_of(const std::vector<Bottleneck>& bottlenecks, const StepFacts& facts);

}  // namespace lockstep::report
