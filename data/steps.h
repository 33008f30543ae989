// Where a loader learns which samples come next.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/splitmix.h"
#include "sampler/sampler.h"

namespace lockstep::data {

/// One step for a loader: what it is, and this rank's samples.
struct Step {
  sampler::StepPlan plan;
  sampler::SamplerState state_after;   // what to resume from once the step is done
  std::vector<std::uint64_t> indices;  // plan.local_count of them
  /// Training reads sample i changed at random, by draw_of(*key, i); nothing: samples are read as they are.
  std::optional<std::uint64_t> key;
};

/// Whatever the rank, the world size and the place within the epoch.
inline std::uint64_t draw_of(std::uint64_t key, std::uint64_t index) { return mix64(key, index); }

/// A row of steps. Not thread-safe.
class StepSource {
 public:
  virtual ~StepSource() = default;
  /// An upper bound of plan.local_count.
  virtual std::uint64_t max_count() const = 0;
  /// Writes the next step and advances; allocates nothing if step.indices has capacity for max_count().
  virtual void next(Step& step) = 0;
};

/// Training: the sampler's steps, without end.
class SampledSteps : public StepSource {
 public:
  explicit SampledSteps(sampler::DistributedSampler sampler) : sampler_(std::move(sampler)) {}
  std::uint64_t max_count() const override { return sampler_.max_local_count(); }
  void next(Step& step) override;

 private:
  sampler::DistributedSampler sampler_;
};

/// Evaluation: the samples of `range` in order, `batch` ≥ 1 at a time, and empty steps after the last. The plans know
/// this rank's part only: global and local ranges are the same, state_after stays at zero.
class RangeSteps : public StepSource {
 public:
  RangeSteps(sampler::Slice range, std::uint64_t batch);
  std::uint64_t max_count() const override;
  void next(Step& step) override;

 private:
  sampler::Slice range_;
  std::uint64_t batch_;
  std::uint64_t done_ = 0;
};

}  // namespace lockstep::data
