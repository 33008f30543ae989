// How the ranks of several hosts come together.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/hosts/intra_host_sync.h"
#include "comm/hosts/link.h"
#include "comm/hosts/peer_connector.h"
#include "comm/hosts/plan.h"
#include "comm/shm/peers.h"
#include "comm/shm/segment.h"
#include "comm/store.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

/// How long a connection may stay without an acknowledgement, unless the group's timeout is shorter: far longer than
/// the restart of a switch or the replugging of a cable.
inline constexpr auto kLinkPatience = std::chrono::seconds(30);

/// What a group on several hosts is made of, on one rank.
struct HostConnections {
  int rank = 0;
  int ranks = 1;
  int host = 0;      // of peers.hosts()
  int local = 0;     // this rank's number on it
  int channels = 1;  // as many as the smallest host has ranks
  Peers peers;
  HostBoard layout;  // of each rank's part of the board
  Segment board;
  WakeupPipes pipes;
  std::vector<Link> links;  // to the ranks of the same channel, in the order of their hosts; none without a channel
  std::unique_ptr<PeerConnector> connector;  // for sends to ranks of other hosts, and receives from them
  HostTuning tuning = {};
  bool encrypts = false;  // what the links carry
};

/// Note [Between hosts]
/// Ranks with the same number on their hosts connect with each other, one connection per pair. The lower rank puts its
/// addresses into the store. The higher rank tries them in order until one answers. A call begins with Note
/// [Handshake]. It proves both ranks' identities with a secret for this rendezvous alone, which is derived from the
/// job's secret and from random bits that rank 0 has put into the store. (Where MPI is the store, these alone are the
/// secret, unless all ranks have LOCKSTEP_JOB_SECRET.) Every other caller is rejected. Sends and receives between two
/// ranks of different hosts have a connection of their own, which is made when both want it: each rank listens on, and
/// takes calls while a transfer of its own is under way.
///
/// Collective. `rendezvous` has the host where the ranks of `store` have joined, if over TCP, and their secret. Throws
/// UsageError for a LOCKSTEP_SOCKET_IFNAME that names nothing; DeviceError if ranks of one host cannot share memory, or
/// ranks of two hosts cannot connect before `deadline`. Both are thrown on the lowest rank that fails, and PeerError on
/// the others; `store` and `peers` then stay as they were.
HostConnections connect_hosts(Store& store, Peers& peers, const Rendezvous& rendezvous, Clock::duration timeout);

}  // namespace lockstep::comm
