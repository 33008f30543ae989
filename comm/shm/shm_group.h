// Collectives in memory that all ranks share.
#pragma once

#include <memory>

#include "comm/process_group.h"
#include "comm/shm/peers.h"
#include "comm/store.h"

namespace lockstep::comm {

/// The group of the ranks of `store`, which must all be on one host: no data goes through the kernel or another
/// process. Collective, blocking. Operations move on whenever the caller issues, polls, asks or waits; a wait spins
/// briefly (not at all where ranks outnumber cores) and then sleeps. Notes [Shared memory] and [Slots] say how.
///
/// On success the group takes `store`, and its shutdown() ends it. Where the ranks cannot share memory, DeviceError on
/// the lowest rank that cannot and PeerError on the others, and `store` is left where it was, of use for something
/// else.
std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Clock::duration timeout);
/// For ranks that have met: `peers` are those of `store`, and are taken with it.
std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Peers&& peers, Clock::duration timeout);

}  // namespace lockstep::comm
