// When the buckets of one step became ready, started and ended.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::ddp {

struct BucketTimes {
  std::size_t bytes = 0;
  Clock::time_point ready;  // its last gradient was there
  Clock::time_point start;  // its collective was issued
  Clock::time_point end{};  // first seen to be complete; Clock::time_point{}: not yet
};

struct StepTimeline {
  Clock::time_point begin;       // of the step
  Clock::time_point last_ready;  // the last gradient of all was there
  Clock::time_point waits_from;  // backward was over
  std::vector<BucketTimes> buckets;
};

/// One line a bucket and one for the step, times in ms since it began:
///   bucket 0 (1.2 MB): ready 3.10, allreduce 3.11–4.02 ms
///   last gradient ready at 9.70 ms
std::string describe(const StepTimeline& timeline);

}  // namespace lockstep::ddp
