#include "lockstep/ddp/timeline.h"

#include <fmt/format.h>

#include "base/text.h"

namespace lockstep::ddp {

std::string describe(const StepTimeline& timeline) {
  const auto ms = [&](Clock::time_point t) { return 1e3 * seconds_between(timeline.begin, t); };
  std::string text;
  for (std::size_t i = 0; i < timeline.buckets.size(); ++i) {
    const auto& bucket = timeline.buckets[i];
    const std::string end = bucket.end == Clock::time_point{} ? "?" : fmt::format("{:.2f}", ms(bucket.end));
    text += fmt::format("bucket {} ({}): ready {:.2f}, allreduce {:.2f}–{} ms\n", i,
                        human_bytes(static_cast<double>(bucket.bytes)), ms(bucket.ready), ms(bucket.start), end);
  }
  return text + fmt::format("last gradient ready at {:.2f} ms", ms(timeline.last_ready));
}

}  // namespace lockstep::ddp
