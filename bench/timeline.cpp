#include "bench/timeline.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"

namespace lockstep::bench {

double Timeline::communication_ms() const {
  double sum = 0;
  for (const auto& bucket : buckets) sum += bucket.end_ms - bucket.start_ms;
  return sum;
}

double Timeline::hidden_ms() const {
  double sum = 0;
  for (const auto& bucket : buckets)
    sum += std::max(0.0, std::min(bucket.end_ms, last_ready_ms) - std::min(bucket.start_ms, last_ready_ms));
  return sum;
}

std::string describe(const Timeline& timeline) {
  std::string text;
  for (std::size_t i = 0; i < timeline.buckets.size(); ++i) {
    const auto& bucket = timeline.buckets[i];
    text +=
        fmt::format("  bucket {:<2} ({:>8})      ready {:.3f}, allreduce {:.3f}–{:.3f} ms\n", i,
                    human_bytes(static_cast<double>(bucket.bytes)), bucket.ready_ms, bucket.start_ms, bucket.end_ms);
  }
  text += fmt::format("  last gradient ready    {:>10.3f} ms   step ended at {:.3f} ms ({}'s clock)\n",
                      timeline.last_ready_ms, timeline.end_ms, timeline.clock);
  const double communication = timeline.communication_ms();
  return text + fmt::format("  allreduce              {:>10.3f} ms   of which backward hid {:.3f} ms{}\n",
                            communication, timeline.hidden_ms(),
                            communication > 0 ? fmt::format(" ({:.0f} %)", 100 * timeline.hidden_ms() / communication)
                                              : std::string());
}

Timeline timeline_of(const ddp::StepTimeline& step, Clock::time_point begin, Clock::time_point end) {
  const auto ms = [&](Clock::time_point t) { return 1e3 * seconds_between(begin, t); };
  Timeline timeline{.clock = "host", .buckets = {}, .last_ready_ms = ms(step.last_ready), .end_ms = ms(end)};
  for (const auto& bucket : step.buckets)
    timeline.buckets.push_back({.bytes = bucket.bytes,
                                .ready_ms = ms(bucket.ready),
                                .start_ms = ms(bucket.start),
                                .end_ms = ms(bucket.end == Clock::time_point{} ? end : bucket.end)});
  return timeline;
}

}  // namespace lockstep::bench
