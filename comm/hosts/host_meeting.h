// How the ranks of several hosts come together.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/hosts/intra_host_sync.h"
#include "comm/hosts/link.h"
#include "comm/hosts/plan.h"
#include "comm/shm/peers.h"
#include "comm/shm/segment.h"
#include "comm/store.h"
#include "comm/world.h"

namespace lockstep::comm {

/// How long a connection on which nothing is acknowledged is given, where the group's timeout is not shorter: far
/// longer than a switch that restarts or a cable that is plugged in again takes.
inline constexpr auto kLinkPatience = std::chrono::seconds(30);

/// What a group on several hosts is made of, on one rank.
struct HostMeeting {
  int rank = 0;
  int ranks = 1;
  int host = 0;      // of peers.hosts()
  int local = 0;     // this rank's number on it
  int channels = 1;  // as many as the smallest host has ranks
  Peers peers;
  Segment board;  // a NodeControlBlock in each rank's part, and the texts of all ranks after it
  WakeupPipes pipes;
  std::vector<Link> links;  // to the ranks of the same channel, in the order of their hosts; none without a channel
  HostTuning tuning = {};
  bool encrypts = false;  // what the links carry
};

/// Note [Between hosts]
/// Ranks with the same number on their hosts connect with each other, one connection a pair: the higher rank calls, at
/// the addresses that the lower one has put into the store, one after the other, until one answers. A call begins with
/// Note [Handshake]: who calls whom, proven with a secret of this meeting's own, which is made of the job's and of
/// random bits of rank 0's that have come through the store. (Where MPI is the store, these alone are the secret,
/// unless all ranks have LOCKSTEP_JOB_SECRET.) Whoever says anything else is turned away. When all have all their
/// connections, nobody listens any more.
///
/// Collective. `meeting` has the host where the ranks of `store` meet, if they do over TCP, and their secret. Throws
/// UsageError for a LOCKSTEP_SOCKET_IFNAME that names nothing; DeviceError where the ranks of a host cannot share
/// memory, or those of two cannot connect before `deadline`; both on the lowest rank that fails, PeerError on the
/// others, and `store` and `peers` are left where they were.
HostMeeting meet_hosts(Store& store, Peers& peers, const MeetingPoint& meeting, Clock::duration timeout);

}  // namespace lockstep::comm
