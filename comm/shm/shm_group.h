// Collectives in memory that all ranks share.
#pragma once

#include <memory>

#include "comm/process_group.h"

namespace lockstep::comm {

/// The group of the ranks of `bootstrap`, which must all be on one host: no data goes through the kernel or another
/// process. Collective, blocking. Operations move on whenever the caller issues, polls, asks or waits; a wait spins
/// briefly (not at all where ranks outnumber cores) and then sleeps. Notes [Shared memory] and [Slots] say how.
///
/// On success the group takes `bootstrap`, and its shutdown() ends it. Where the ranks cannot share memory,
/// DeviceError on the lowest rank that cannot and PeerError on the others, and `bootstrap` is left as it was.
std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<ProcessGroup>&& bootstrap);

}  // namespace lockstep::comm
