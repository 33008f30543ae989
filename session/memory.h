// What a run will take of memory, checked before it takes any.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/process_group.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::session {

/// Bytes of one rank, all of which are there at one time. Parameters, gradients and moments are what they will be;
/// activations are what the allocator will be asked for in the largest step. What kernels keep for themselves (packed
/// weights: with convolutions up to four times the parameters) and what blocks are rounded up by is not in it: a run
/// takes at least this much. docs/models.md has both numbers for all models.
struct MemoryNeed {
  std::uint64_t parameters = 0;  // and buffers, and their bf16 copies
  std::uint64_t gradients = 0;
  std::uint64_t moments = 0;      // what the optimizer remembers, and a moving average
  std::uint64_t activations = 0;  // of forward, and of backward's own
  std::uint64_t batches = 0;      // that are read ahead
  std::uint64_t checkpoint = 0;   // the copy of the state that is written

  std::uint64_t total() const { return parameters + gradients + moments + activations + batches + checkpoint; }
  MemoryNeed& operator+=(const MemoryNeed& other);
};

/// "parameters 14.4 GB, gradients 14.4 GB, moments 28.8 GB": what there is of each.
std::string text_of(const MemoryNeed& need);

/// Of one rank: on its host, and on its GPU if it computes on one.
struct MemoryNeeds {
  MemoryNeed host, device;
};

/// Collective. Throws OutOfMemoryError (PeerError on the other ranks) if ranks that share the memory of a machine,
/// control group or GPU together need more than is free. The error names the uses, the free memory, and the owner of
/// the limit. What the system does not say is not checked.
void check_memory(comm::ProcessGroup& group, nn::Backend& backend, const MemoryNeeds& mine);

}  // namespace lockstep::session
