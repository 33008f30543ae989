// Making all ranks' copies of a state equal, and checking that they are.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::ddp {

/// Memory of the group's device, or the host's, that these functions borrow for the call: it is reached through
/// ProcessGroup::copy() alone.
struct NamedBytes {
  std::string name;
  std::span<std::byte> bytes;
};

/// Collective: afterwards every rank's pieces hold rank `root`'s bytes. All ranks name the same pieces (OutOfStepError
/// where they have other sizes in all). Needs at most 4 MiB of arena at a time.
void broadcast_state(comm::ProcessGroup& group, std::span<const NamedBytes> pieces, int root);

/// Collective: throws OutOfStepError on every rank unless all ranks have issued the same operations and hold the same
/// bytes, by a hash of 64 bits: naming the first piece that differs, and the ranks that differ from the majority if
/// there is one. Costs about a reading of the pieces, and two collectives of a few bytes.
void check_replicas(comm::ProcessGroup& group, std::span<const NamedBytes> pieces);

}  // namespace lockstep::ddp
