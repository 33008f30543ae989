// What carries a bucket of gradients between the ranks: the place for compression, sharding and other sums.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "lockstep/comm/process_group.h"

namespace lockstep::ddp {

/// A bucket whose gradients are complete on this rank.
struct GradBucket {
  std::size_t index = 0;  // in the order in which buckets are reduced
  std::int64_t step = 0;
  comm::Region gradients;  // f32 in the reducer's arena: slots at multiples of 64 bytes, zeros between them
  std::span<const std::size_t> slots;
  bool last = false;  // of the step
};

/// Turns one rank's gradients into those of all ranks, in place of the allreduce that a Reducer does without one
/// (PyTorch's register_comm_hook). Counts, losses and unused slots travel beside the buckets, where no hook sees them.
///
/// Buckets come in the same order on every rank. A hook issues the same collectives on all of them (comm Note [Same
/// order]), on the bucket itself or on arenas of its own, and at least one per bucket. One thread calls it; on a device
/// it gives its work to the group's computation stream, and where steps are captured as graphs it is captured too: it
/// must neither wait on the host nor allocate then.
class CommHook {
 public:
  virtual ~CommHook() = default;
  /// What ranks compare, settings included: "bf16", "powersgd:4".
  virtual std::string name() const = 0;
  /// Issues the bucket's collective, while backward continues. Returns the last one that it has issued.
  virtual comm::Work start(const GradBucket& bucket, comm::ProcessGroup& group) = 0;
  /// Work given to `stream` now finds what start() has issued complete. Afterwards the bucket's region holds the
  /// result.
  virtual void finish(const GradBucket& bucket, StreamView stream) = 0;
};

}  // namespace lockstep::ddp
