// Connections between hosts in the making.
#pragma once

#include <poll.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/authenticated_listener.h"
#include "base/network.h"
#include "base/scope.h"
#include "comm/hosts/link.h"
#include "comm/shm/peers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::comm {

/// The addresses to try, best first. With LOCKSTEP_SOCKET_IFNAME: those of the interfaces that it names; UsageError
/// where there are none. Without: the one from which this host reaches `target` (a name or an address; empty: none),
/// then those of all other interfaces that are up, bridges of containers last; loopback only if there is nothing else,
/// or if `target` is there. Addresses that hold for one link only (fe80::) do not count.
std::vector<NetworkInterface> usable_addresses(const EnvLookup& lookup, const std::string& target);

/// Where a rank listens.
struct ListenAddress {
  std::string host;  // "10.0.0.1"
  int port = 0;
};

/// One rank's connections with ranks of other hosts (Note [Between hosts]): those of its channel, which are made at
/// once, and one with each rank for sends and receives, which is made when it is wanted. Not thread-safe.
class PeerConnector {
 public:
  enum class Purpose : std::uint8_t { kChannel, kPair };

  /// `patience` is how long a peer may be silent before keepalive gives the connection up.
  PeerConnector(int rank, Clock::duration patience);
  ~PeerConnector();
  PeerConnector(PeerConnector&&) = delete;

  /// Listens at each of these addresses, at a free port; where, for the others. Throws DeviceError where none will do.
  std::vector<ListenAddress> listen(const std::vector<NetworkInterface>& interfaces);
  /// There is to be a connection to `rank` of `peers`, which listens there. Lower ranks are called, higher ones call.
  void expect(const Peers& peers, int rank, std::vector<ListenAddress> addresses, Purpose purpose = Purpose::kChannel);
  /// Makes all those of the channel, with those who know `secret` and encrypt, or do not, as this rank does; in the
  /// order of expect(). Nobody listens afterwards, unless pairs are expected. Throws DeviceError naming a rank that
  /// cannot be reached, or has not called, before `deadline`.
  std::vector<Link> connect(const JobSecret& secret, bool encrypts, Deadline deadline);

  // After connect(), of connections for sends and receives:

  /// One with `rank` is wanted from now on. If that one is lower it is called; else it will call, when it wants one
  /// too.
  void want(int rank);
  /// Does what can be done now.
  void advance() { look(Clock::duration::zero()); }
  /// The connection with `rank`, once it is there; once.
  std::optional<Link> take(int rank);
  /// Why there is none yet, for messages: "10.0.0.2:4711: Connection refused"; empty: nothing is known.
  std::string trouble_with(int rank) const;
  /// What poll(2) waits for.
  void listen_to(std::vector<pollfd>& entries) const;

 private:
  struct Connection;

  void start_connecting(Connection& connection);
  void continue_connecting(Connection& connection);
  void disconnect(Connection& connection, const std::string& why);
  void take_callers();
  /// If it is one of those that are to call; its refusal is on its way otherwise.
  void take(AuthenticatedListener::Caller& caller);
  void set_up(const UniqueFd& socket) const;
  /// Waits at most so long for something to do, and does it.
  void look(Clock::duration at_most);
  Connection* pair_with(int rank);
  [[noreturn]] void give_up(double waited_seconds) const;

  const int rank_;
  const Clock::duration patience_;
  std::vector<UniqueFd> sockets_;  // until connect()
  std::optional<AuthenticatedListener> listener_;
  std::string listens_at_;
  std::vector<Connection> connections_;
  JobSecret secret_;
  bool encrypts_ = false;
};

}  // namespace lockstep::comm
