// The share of a bucket that each rank updates (ZeRO, stage 1), and the hook that brings it the sums.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {

/// Note [Sharded updates]
/// ZeRO, stage 1 (Rajbhandari et al., 2020; PyTorch's ZeroRedundancyOptimizer): every rank computes gradients of all
/// parameters, and each element is updated by one rank, its owner, which alone has what an optimizer remembers of it.
///
///   backward    buckets become ready one after the other, as without; each is reduce-scattered: the owner of a slice
///               has its sums, added in the same order as an allreduce adds them, and the rest of the bucket is
///               unspecified
///   update      each rank moves its slice of a bucket, when the sums of that bucket are there
///   gather      the buckets' parameters, which lie in an arena of the same layout, are gathered in place, on the CPU
///               while the next forward pass computes (parallel: Note [Gathers during forward]). Where all ranks share
///               memory, owners write into the copies of all ranks instead (parallel: Note [Direct writes])
///
/// Rank r's slice of a bucket is comm::slice_of() it. Blocks of elements that nobody may cut (those over which norms
/// are summed) are not cut: slots begin at multiples of a block (BucketLimits::slot_alignment), and a bucket is a
/// multiple of one block for each rank. So norms are the sums of the same blocks in the same order whoever has computed
/// them, and a run has the same parameters, bit for bit, with sharded updates and without.
///
/// The order of buckets stays that of registration, reversed: an element's owner never changes in a run.

struct SlotSlice {
  std::size_t begin = 0, count = 0;  // elements
};

/// By slot, what rank `rank` of `ranks` owns of it. A pure function.
std::vector<SlotSlice> slices_of_rank(const BucketPlan& plan, std::span<const SlotSpec> slots, int rank, int ranks);

/// Sums of a bucket, on each rank those of its slice.
class ReduceScatterHook final : public CommHook {
 public:
  std::string name() const override { return "reduce_scatter"; }
  comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) override {
    return group.reduce_scatter(bucket.gradients, comm::ReduceOp::kSum);
  }
  void finish(const GradBucket&, StreamView) override {}
};

}  // namespace lockstep::ddp
