// Finds the size of buckets with which steps are shortest.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"

namespace lockstep::ddp {

/// Note [Bucket tuning]
/// How long a step takes with buckets of some size depends on the links, on when gradients become ready, and on what
/// collectives take from backward where they share cores and memory. A prediction from link speed and ready times alone
/// misses the last of these, which is most of it inside a host. So sizes are tried in the first steps, and whole steps
/// are timed: a size has a block of steps, of which the first does not count, then comes the next one's. After each
/// round the slower half is left out, until one size is left; what was measured in earlier rounds counts too. A size's
/// time is the median of its steps on the slowest rank.
///
/// Which size a step has is a function of the number of steps and of what all ranks have agreed on: ranks that call
/// add_step() equally often, and settle() with the same numbers, have the same sizes.
class BucketTuner {
 public:
  /// Sizes in bytes, each of which gives other buckets (sizes_to_try()). Where the best one is not faster than
  /// `preferred` by at least 1 %, that is chosen.
  BucketTuner(const std::vector<std::size_t>& sizes, std::size_t preferred);

  bool done() const { return left_.size() == 1; }
  /// Of the next step; when it is done, the choice.
  std::size_t bytes() const { return trials_[left_[at_]].bucket_bytes; }
  /// A step with bytes() took so long. True: a round has ended, and settle() is due before the next step.
  bool add_step(double seconds);
  /// This rank's medians of the sizes that the round had, in seconds.
  std::vector<double> medians() const;
  /// The same, each the slowest rank's.
  void settle(std::span<const double> slowest);

  /// When it is done. The time of a size is that of the last round that it was in.
  BucketChoice choice() const { return {.bucket_bytes = bytes(), .trials = trials_, .steps = steps_}; }

 private:
  std::vector<BucketChoice::Trial> trials_;
  std::size_t preferred_;
  std::vector<std::vector<double>> measured_;  // seconds, by trial
  std::vector<std::size_t> left_;              // trials
  std::size_t at_ = 0;                         // of left_
  std::size_t in_block_ = 0, steps_ = 0;
  std::size_t last_rounds_ = 0;  // that the last two have had
};

/// Powers of two from 1 MiB on, `limits.bucket_bytes` and one size that is enough for all: those of them that give
/// different buckets, in ascending order.
std::vector<std::size_t> sizes_to_try(std::span<const SlotSpec> slots, std::span<const std::size_t> order,
                                      const BucketLimits& limits);

}  // namespace lockstep::ddp
