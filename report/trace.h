// What --trace has written of a run (trainer/trace.h), as a report needs it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::report {

/// What a rank does on its own thread, and its collectives, which run beside.
enum class Phase : std::uint8_t { kData, kForward, kBackward, kOptimizer, kWait, kOther, kCollective };
inline constexpr std::size_t kPhases = 6;  // of its own thread
const char* name_of(Phase phase);

struct TraceSpan {
  std::string name;
  Phase phase = Phase::kOther;
  int row = 0;                // trainer's: 1 is the rank's own thread, 1000 + b bucket b's collectives
  double begin = 0, end = 0;  // in ms, on one clock for all ranks
};

/// Of one step on one rank.
struct TracedStep {
  int rank = 0;
  std::int64_t step = 0;
  double begin = 0, end = 0;
  std::vector<TraceSpan> spans = {};  // those inside of it
};

struct Trace {
  std::vector<std::string> ranks;  // "rank 0 (host a)"
  std::vector<TracedStep> steps;   // by step, then by rank; whole ones
  double span_ms = 0;
};

/// Throws IoError, which names `path`, for what is no such trace.
Trace parse_trace(std::string_view text, const std::string& path);
Trace read_trace(const std::string& path);

/// The mean time of a step, by rank and phase, in ms; what is left of the steps is in kOther.
std::vector<std::vector<double>> mean_phases(const Trace& trace);

/// Of a step on a rank: collectives' time, and of it what the rank did not wait for, in ms.
struct Overlap {
  double collectives_ms = 0, hidden_ms = 0;
};
Overlap overlap_of(const TracedStep& step);

/// The step whose time is the median of rank 0's, on all ranks.
std::vector<const TracedStep*> typical_step(const Trace& trace);

}  // namespace lockstep::report
