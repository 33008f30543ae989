#include "comm/hosts/host_connections.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "lockstep/base/job_secret.h"
#include "lockstep/comm/failure.h"

namespace lockstep::comm {
namespace {

// Connections that cannot be made are to be known well before the timeout of a whole job: there may be another
// way.
constexpr auto kConnectWithin = std::chrono::seconds(30);

/// What went wrong on this rank, so that all ranks learn of it and continue or fail together.
class Problem {
 public:
  template <class Action>
  void catch_from(Action&& action) {
    if (!text_.empty()) return;
    try {
      action();
    } catch (const UsageError& error) {
      keep(error);
    } catch (const DeviceError& error) {
      keep(error);
    } catch (const PeerError&) {
      // The ranks of one host have agreed already, and the one that failed speaks.
      text_ = " ";
    }
  }

  const std::string& text() const { return text_; }

  /// Throws on all ranks if there is a text among `all`: this rank's own error where it is the lowest that has one.
  void settle(const std::vector<std::string>& all, int rank) const {
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].empty() || all[r] == " ") continue;
      if (static_cast<int>(r) == rank && failure_ != nullptr) std::rethrow_exception(failure_);
      const int code = failure_code(parse_int(all[r].substr(0, all[r].find(' '))).value_or(4));
      throw PeerError(code, fmt::format("rank {}: {}", r, all[r].substr(all[r].find(' ') + 1)));
    }
  }

 private:
  void keep(const Error& error) {
    failure_ = std::current_exception();
    text_ = fmt::format("{} {}", error.code(), error.what());
  }

  std::string text_;
  std::exception_ptr failure_;
};

/// What a rank sends to the others before they connect: the number of its wakeup pipe, then an address and a port per
/// line.
struct Introduction {
  int pipe = -1;
  std::vector<ListenAddress> addresses;

  std::string encode() const {
    std::string text = fmt::format("{}\n", pipe);
    for (const ListenAddress& address : addresses) text += fmt::format("{} {}\n", address.host, address.port);
    return text;
  }
  static Introduction decode(const std::string& text) {
    Introduction one;
    std::istringstream in(text);
    in >> one.pipe;
    for (ListenAddress address; in >> address.host >> address.port;) one.addresses.push_back(address);
    return one;
  }
};

/// Where this rank is among the hosts.
HostConnections unconnected(const Store& store, const Peers& peers) {
  const Hosts& hosts = peers.hosts();
  HostConnections connections;
  connections.rank = store.rank();
  connections.ranks = store.size();
  connections.host = peers.host_of(connections.rank);
  const std::vector<int>& here = hosts[static_cast<std::size_t>(connections.host)];
  connections.local = static_cast<int>(std::ranges::lower_bound(here, connections.rank) - here.begin());
  connections.channels = static_cast<int>(std::ranges::min(hosts, {}, &std::vector<int>::size).size());
  return connections;
}

}  // namespace

HostConnections connect_hosts(Store& store, Peers& peers, const Rendezvous& rendezvous, Clock::duration timeout) {
  const auto deadline = Deadline::after(timeout);
  const Hosts& hosts = peers.hosts();
  HostConnections connections = unconnected(store, peers);
  connections.encrypts = rendezvous.encrypts;
  const std::vector<int>& here = hosts[static_cast<std::size_t>(connections.host)];
  const bool drives = connections.local < connections.channels;

  Problem problem;
  // Segment::map asks twice, but for a host that fails in between: all hosts take part in both.
  int round = 0;
  const auto exchange = [&](const std::string& mine) {
    const auto all = store.all_gather_text(fmt::format("sharing memory, round {}", ++round), mine, deadline);
    std::vector<std::string> ours;
    for (const int rank : here) ours.push_back(all[static_cast<std::size_t>(rank)]);
    return ours;
  };
  const int local_size = static_cast<int>(here.size());
  connections.layout = HostBoard(connections.ranks, local_size);
  problem.catch_from(
      [&] { connections.board = Segment::map(connections.local, local_size, connections.layout.bytes, exchange); });
  while (round < 2) exchange("");

  Introduction mine;
  problem.catch_from([&] {
    mine.pipe = connections.pipes.number();
    connections.connector =
        std::make_unique<PeerConnector>(connections.rank, std::min<Clock::duration>(kLinkPatience, timeout));
    mine.addresses = connections.connector->listen(usable_addresses(env, rendezvous.host));
  });
  problem.settle(store.all_gather_text("preparing connections", problem.text(), deadline), connections.rank);
  std::vector<Introduction> introductions;
  for (const std::string& text : store.all_gather_text("exchanging addresses", mine.encode(), deadline))
    introductions.push_back(Introduction::decode(text));
  // Every rank waits for all: what is said in a split reaches the others when the one that says it waits for something
  // (Note [Splitting]), and from here on ranks wait for connections.
  const std::string nonce = store.all_gather_text(
      "naming the job", connections.rank == 0 ? JobSecret::random().text() : std::string(), deadline)[0];
  const JobSecret secret = rendezvous.secret.derive("data connections " + nonce);

  problem.catch_from([&] {
    for (std::size_t i = 0; i < here.size(); ++i) {
      const int rank = here[i];
      if (rank == connections.rank) continue;
      connections.pipes.open(i, peers.pid_of(rank), introductions[static_cast<std::size_t>(rank)].pipe);
    }
    const auto expect = [&](int rank, PeerConnector::Purpose purpose) {
      connections.connector->expect(peers, rank, introductions[static_cast<std::size_t>(rank)].addresses, purpose);
    };
    for (std::size_t h = 0; h < hosts.size(); ++h) {
      if (static_cast<int>(h) == connections.host) continue;
      if (drives) expect(hosts[h][static_cast<std::size_t>(connections.local)], PeerConnector::Purpose::kChannel);
      for (const int rank : hosts[h]) expect(rank, PeerConnector::Purpose::kPair);
    }
    connections.links = connections.connector->connect(
        secret, rendezvous.encrypts, Deadline::after(std::min<Clock::duration>(kConnectWithin, timeout)));
  });
  problem.settle(store.all_gather_text("connecting the hosts", problem.text(), Deadline::after(timeout)),
                 connections.rank);

  peers.watch(connections.rank);
  connections.peers = std::move(peers);
  return connections;
}

}  // namespace lockstep::comm
