// Making all ranks' copies of a state equal, and checking that they are.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace lockstep::ddp {

/// Memory of the group's device, or the host's: it is reached through ProcessGroup::copy() alone.
struct NamedBytes {
  std::string name;
  std::span<std::byte> bytes;
};

/// Collective: afterwards every rank's pieces hold rank `root`'s bytes. All ranks name the same pieces. Needs at most
/// 4 MiB of arena at a time.
void broadcast_state(comm::ProcessGroup& group, std::span<const NamedBytes> pieces, int root);

/// Collective: throws OutOfStepError on every rank, naming a piece and a rank, unless all pieces are bitwise equal to
/// rank 0's (compared by SHA-256 of copies, piece by piece).
void check_replicas(comm::ProcessGroup& group, std::span<const NamedBytes> pieces);

}  // namespace lockstep::ddp
