#include "data/steps.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace lockstep::data {

void SampledSteps::next(Step& step) {
  step.plan = sampler_.plan();
  step.indices.resize(step.plan.local_count);
  sampler_.indices(step.plan, step.indices);
  // Other bits than those that the same seed orders the epoch by.
  constexpr std::uint64_t kChanges = 0x6368616e676573;
  step.key = mix64(sampler_.config().seed ^ kChanges, step.plan.epoch);
  sampler_.advance();
  step.state_after = sampler_.state();
}

RangeSteps::RangeSteps(sampler::Slice range, std::uint64_t batch) : range_(range), batch_(batch) {
  check_usage(batch >= 1, "an evaluation batch of 0 samples", "give 1 or more");
}

std::uint64_t RangeSteps::max_count() const { return std::min(batch_, range_.count); }

void RangeSteps::next(Step& step) {
  step.plan = {};
  step.plan.step_in_epoch = done_ / batch_;
  step.plan.global_begin = step.plan.local_begin = range_.begin + done_;
  step.plan.global_count = step.plan.local_count = std::min(batch_, range_.count - done_);
  done_ += step.plan.local_count;
  step.plan.last_of_epoch = done_ == range_.count;
  step.indices.resize(step.plan.local_count);
  std::iota(step.indices.begin(), step.indices.end(), step.plan.local_begin);
}

}  // namespace lockstep::data
