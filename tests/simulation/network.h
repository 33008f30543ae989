// What hosts of a simulated job send to each other, on its way.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <stdexcept>
#include <string>

#include "world.h"

namespace lockstep::simulation {

/// Connections between hosts, each two of this machine's own with the supervisor between them. Bytes and ends arrive in
/// their order, after a time that is drawn. A host may be cut off: its bytes arrive when it is back. If nothing can
/// pass for kBreaks, a connection ends on both sides, as TCP's questions of a silent peer end it.
class Network {
 public:
  static constexpr std::uint64_t kBreaks = 90'000'000'000;

  Network(World& world, std::uint64_t latency_ns) : world_(world), latency_ns_(latency_ns) {
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t length;
    const sockaddr_un name = world_.name_of(kSwitch, length);
    if (listener_ < 0 || ::bind(listener_, reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
        ::listen(listener_, 128) != 0)
      throw std::runtime_error("no socket for the simulated network");
  }

  void cut(int host, std::uint64_t until) { cut_[host] = std::max(cut_[host], until); }
  /// It says no word more: its processes are ended by the caller.
  void lose(int host) { world_.lost[host] = true; }

  /// Takes what was sent, and delivers what has arrived by now.
  void work() {
    world_.traffic = false;
    accept_calls();
    for (Connection& connection : connections_) {
      take(connection, connection.there_to_here);
      take(connection, connection.here_to_there);
    }
    for (Connection& connection : connections_) advance(connection);
    std::erase_if(connections_, [](const Connection& connection) { return connection.closed; });
  }

  /// When no host is cut off any more.
  std::uint64_t cut_until() const {
    std::uint64_t latest = 0;
    for (const auto& [host, until] : cut_) latest = std::max(latest, until);
    return latest;
  }

  /// When something arrives next.
  std::uint64_t next() const {
    std::uint64_t soonest = kNever;
    for (const Connection& connection : connections_) {
      if (!connection.connected) soonest = std::min(soonest, passable(connection, connection.connects_at));
      for (const Direction* direction : {&connection.here_to_there, &connection.there_to_here})
        if (!direction->pieces.empty() && connection.connected)
          soonest = std::min(soonest,
                             passable(connection, std::max(direction->pieces.front().arrives, direction->not_before)));
    }
    return soonest;
  }

 private:
  struct Piece {
    std::uint64_t arrives;
    std::string bytes;  // none: the end
  };
  struct Direction {
    int* from;
    int* to;
    std::deque<Piece> pieces = {};
    std::uint64_t last = 0, not_before = 0;
    bool ended = false, delivered_end = false;
  };
  struct Connection {
    Place from, to;
    int here = -1, there = -1;  // sockets of the caller's side and the called one's
    bool connected = false, closed = false;
    std::uint64_t connects_at = 0;
    Direction here_to_there{&here, &there}, there_to_here{&there, &here};
    Connection(Place caller, Place called) : from(caller), to(called) {}
    Connection(const Connection&) = delete;
  };

  /// kNever: not at all.
  std::uint64_t passable(const Connection& connection, std::uint64_t time) const {
    const std::uint64_t held = std::max(cut_until(connection.from.host), cut_until(connection.to.host));
    if (world_.lost[connection.from.host] || world_.lost[connection.to.host] || held > time + kBreaks)
      return time + kBreaks;
    return std::max(time, held);
  }
  bool is_broken(const Connection& connection, std::uint64_t time) const {
    return world_.now >= time + kBreaks && passable(connection, time) == time + kBreaks;
  }
  std::uint64_t cut_until(int host) const {
    const auto found = cut_.find(host);
    return found == cut_.end() ? 0 : found->second;
  }
  std::uint64_t arrival(Direction& direction) {
    direction.last = std::max(direction.last, world_.now + 1 + world_.draw_below(latency_ns_));
    return direction.last;
  }

  void accept_calls() {
    for (;;) {
      sockaddr_un name = {};
      socklen_t length = sizeof name;
      const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&name), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) return;
      Place from;
      World::read_name(name, from);
      for (std::uint32_t i = 0; i < world_.call_count; ++i) {
        if (world_.calls[i].from != from) continue;
        Connection& made = connections_.emplace_back(from, world_.calls[i].to);
        made.here = fd;
        made.connects_at = arrival(made.here_to_there);
        world_.calls[i] = world_.calls[--world_.call_count];
        break;
      }
    }
  }

  void take(Connection& connection, Direction& direction) {
    const bool lost = world_.lost[connection.from.host] || world_.lost[connection.to.host];
    while (*direction.from >= 0 && !direction.ended) {
      char bytes[65536];
      const ssize_t got = ::recv(*direction.from, bytes, sizeof bytes, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got <= 0) direction.ended = true;
      if (got <= 0 && lost) return;  // nobody says that it has ended
      direction.pieces.push_back(
          {arrival(direction), got > 0 ? std::string(bytes, static_cast<std::size_t>(got)) : std::string()});
    }
  }

  void advance(Connection& connection) {
    if (!connection.connected && world_.now >= passable(connection, connection.connects_at)) {
      if (is_broken(connection, connection.connects_at) || !connect(connection)) return close(connection);
      connection.connected = true;
    }
    if (!connection.connected) return;
    for (Direction* direction : {&connection.here_to_there, &connection.there_to_here})
      if (!deliver(connection, *direction)) return close(connection);
    if (connection.here_to_there.delivered_end && connection.there_to_here.delivered_end) close(connection);
  }

  bool connect(Connection& connection) {
    connection.there = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t own_length, length;
    const sockaddr_un own = world_.name_of({connection.from.host + kByTheSwitch, connection.from.port}, own_length),
                      there = world_.name_of(connection.to, length);
    if (connection.there < 0 || ::bind(connection.there, reinterpret_cast<const sockaddr*>(&own), own_length) != 0)
      return false;
    world_.change();
    return ::connect(connection.there, reinterpret_cast<const sockaddr*>(&there), length) == 0;
  }

  /// False: the connection is broken.
  bool deliver(Connection& connection, Direction& direction) {
    while (!direction.pieces.empty()) {
      Piece& piece = direction.pieces.front();
      if (world_.now < passable(connection, std::max(piece.arrives, direction.not_before))) return true;
      if (is_broken(connection, piece.arrives)) return false;
      world_.change();
      if (piece.bytes.empty()) {
        ::shutdown(*direction.to, SHUT_WR);
        direction.delivered_end = true;
      } else {
        const ssize_t sent = ::send(*direction.to, piece.bytes.data(), piece.bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent > 0) piece.bytes.erase(0, static_cast<std::size_t>(sent));
        if (!piece.bytes.empty()) {  // until its reader has read some
          direction.not_before = world_.now + 100'000;
          return true;
        }
      }
      direction.pieces.pop_front();
    }
    return true;
  }

  void close(Connection& connection) {
    for (const int fd : {connection.here, connection.there})
      if (fd >= 0) ::close(fd);
    connection.here = connection.there = -1;
    connection.closed = true;
    world_.change();
  }

  World& world_;
  const std::uint64_t latency_ns_;
  int listener_ = -1;
  std::list<Connection> connections_;
  std::map<int, std::uint64_t> cut_;  // until when
};

}  // namespace lockstep::simulation
