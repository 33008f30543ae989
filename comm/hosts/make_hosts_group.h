// Ranks on several hosts, joined by sockets.
#pragma once

#include <memory>

#include "comm/process_group.h"
#include "comm/shm/peers.h"
#include "comm/store.h"
#include "comm/world.h"

namespace lockstep::comm {

/// The group of the ranks of `store`, whose `peers` are on several hosts: memory inside a host, sockets between them
/// (Note [Two levels], Note [Channels], Note [Hosts]). Collective, blocking. `meeting`: the host where they have met,
/// if over TCP, and their secret. With `threaded` a thread of the group moves operations on, else whoever issues,
/// polls, asks or waits.
///
/// On success the group takes `store` and `peers`, and its shutdown() ends the store; throws what meet_hosts() does.
std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store>&& store, Peers&& peers,
                                               const MeetingPoint& meeting, Clock::duration timeout, bool threaded);

}  // namespace lockstep::comm
