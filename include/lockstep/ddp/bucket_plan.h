// The assignment of gradients to buckets: a pure function of sizes, order and limits.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/dtype.h"

namespace lockstep::ddp {

/// A gradient as the reducer sees it: a name for messages and a number of elements; for hooks, whether they are a
/// matrix.
struct SlotSpec {
  std::string name;
  std::size_t count = 0;
  DType dtype = DType::kF32;
  std::size_t rows = 1;  // of a matrix, count / rows elements each, one row after the other; 1: it is none
};

struct BucketLimits {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;  // small, so that communication starts early
  std::size_t bucket_bytes = std::size_t{25} << 20;
  /// Slots begin at multiples of so many bytes of their bucket, and a bucket has a multiple of so many (both of 64):
  /// what has to be shared out evenly (Note [Sharded updates]). Neither is 0.
  std::size_t slot_alignment = 64, bucket_multiple = 64;
};

/// A run of slots in the arena, reduced by one collective.
struct Bucket {
  std::vector<std::size_t> slots;  // indices, in arena order
  std::size_t offset_bytes = 0;
  std::size_t bytes = 0;  // including padding between slots; a multiple of BucketLimits::bucket_multiple
  DType dtype = DType::kF32;
};

struct BucketPlan {
  std::vector<Bucket> buckets;                 // in the order in which they are reduced
  std::vector<std::size_t> slot_offset_bytes;  // by slot
  std::vector<std::size_t> slot_bucket;        // by slot
  std::size_t bytes = 0;  // of all; with a bucket_multiple of 64 the same for every order and all limits
};

/// Fills buckets with the slots in the given order (a permutation of all slot indices). A bucket is closed when the
/// next slot would pass its limit or has another dtype; a slot larger than the limit has a bucket of its own. Slots
/// start at multiples of BucketLimits::slot_alignment. No slots: no buckets. Throws UsageError for an order that is no
/// permutation.
BucketPlan plan_buckets(std::span<const SlotSpec> slots, std::span<const std::size_t> order,
                        const BucketLimits& limits);

/// A size of buckets that was chosen because steps were shortest with it, and what was measured.
struct BucketChoice {
  struct Trial {
    std::size_t bucket_bytes = 0;
    double step_seconds = 0;  // median of the slowest rank's
  };
  std::size_t bucket_bytes = 0;
  std::vector<Trial> trials;  // in ascending order; empty: it is an earlier run's choice
  std::size_t steps = 0;      // that were measured
};

/// One line: "buckets of 4.2 MB, with which a step takes 38.1 ms (1.0 MB: 39.0, 26.2 MB: 60.4), chosen in 44 steps".
std::string describe(const BucketChoice& choice);

}  // namespace lockstep::ddp
