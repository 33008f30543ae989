#include "doctor/links.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>

#include "base/error.h"
#include "base/json_value.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/statistics.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::doctor {
namespace {

constexpr double kConnectSeconds = 2, kStepSeconds = 10;
constexpr double kTransferSeconds = 0.2;
constexpr int kPings = 200;
constexpr std::size_t kBlockBytes = std::size_t{256} << 10;

/// Waits for `events`; whether they came before `deadline`.
bool wait_for(const UniqueFd& socket, short events, Deadline deadline) {
  while (!deadline.expired()) {
    throw_if_stopped("measuring a link");
    pollfd entry{.fd = socket.get(), .events = events, .revents = 0};
    if (::poll(&entry, 1, 50) > 0) return true;
  }
  return false;
}

[[noreturn]] void fail(const char* doing) {
  throw DeviceError(fmt::format("a link broke while {}: {}", doing, errno_text(errno)));
}

void send_all(const UniqueFd& socket, const char* bytes, std::size_t count, Deadline deadline) {
  while (count > 0) {
    const auto sent = ::send(socket.get(), bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes += sent;
      count -= static_cast<std::size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      fail("sending");
    } else if (!wait_for(socket, POLLOUT, deadline)) {
      errno = ETIMEDOUT;
      fail("sending");
    }
  }
}

/// Some bytes, at least one.
std::size_t receive_some(const UniqueFd& socket, char* bytes, std::size_t most, Deadline deadline) {
  while (true) {
    const auto got = ::recv(socket.get(), bytes, most, MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) errno = ECONNRESET;
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) fail("receiving");
    if (!wait_for(socket, POLLIN, deadline)) {
      errno = ETIMEDOUT;
      fail("receiving");
    }
  }
}

void receive_all(const UniqueFd& socket, char* bytes, std::size_t count, Deadline deadline) {
  for (std::size_t got = 0; got < count;) got += receive_some(socket, bytes + got, count - got, deadline);
}

UniqueFd make_listener(int family, int& port) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  sockaddr_storage storage{};
  storage.ss_family = static_cast<sa_family_t>(family);
  socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  const int one = 1;
  if (family == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&storage), length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0)
    return {};
  port = own_address(socket).value_or(SocketAddress()).port();
  return socket;
}

/// Where a rank can be reached, as it says itself.
struct Place {
  std::string address;  // "10.0.0.1"
  int port = 0;
  std::int64_t mbit_s = 0;
  void members(auto& io) { io("address", address, "port", port, "mbit_s", mbit_s); }
};

/// Listens at every address of this host.
struct Listeners {
  UniqueFd v4, v6;
  std::vector<Place> places;

  Listeners(const std::vector<NetworkInterface>& interfaces, const std::string& root) {
    int port4 = 0, port6 = 0;
    v4 = make_listener(AF_INET, port4);
    v6 = make_listener(AF_INET6, port6);
    for (const auto& one : interfaces) {
      const int family = one.address.family(), port = family == AF_INET ? port4 : port6;
      if (!one.is_up || one.is_loopback || port == 0 || (family != AF_INET && family != AF_INET6)) continue;
      const std::string text = one.address.host_text();
      if (text.starts_with("fe80:")) continue;  // of one link: whoever uses it has to name an interface
      std::int64_t mbit_s = 0;
      std::ifstream(root + "/sys/class/net/" + one.name + "/speed") >> mbit_s;
      places.push_back({text, port, std::max<std::int64_t>(mbit_s, 0)});
    }
  }

  /// The connection that knows `token`; others are closed.
  UniqueFd accept(const std::string& token, Deadline deadline) {
    while (!deadline.expired()) {
      throw_if_stopped("waiting for a link");
      std::array<pollfd, 2> entries{pollfd{v4.get(), POLLIN, 0}, pollfd{v6.get(), POLLIN, 0}};
      if (::poll(entries.data(), entries.size(), 50) <= 0) continue;
      for (const pollfd& entry : entries) {
        if ((entry.revents & POLLIN) == 0) continue;
        UniqueFd socket(::accept4(entry.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!socket) continue;
        std::string said(token.size(), '\0');
        try {
          receive_all(socket, said.data(), said.size(), Deadline::after_seconds(kConnectSeconds));
        } catch (const DeviceError&) {
          continue;
        }
        if (equal_in_constant_time(said, token)) return socket;
      }
    }
    return {};
  }
};

/// A connection, or nothing and why in `problem`.
UniqueFd connect_to(const Place& place, const std::string& token, std::string& problem) {
  const auto address = parse_address(place.address, place.port);
  if (!address) return problem = "no address", UniqueFd();
  UniqueFd socket(::socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return problem = errno_text(errno), UniqueFd();
  if (::connect(socket.get(), address->get(), address->length) != 0 && errno != EINPROGRESS)
    return problem = errno_text(errno), UniqueFd();
  if (!wait_for(socket, POLLOUT, Deadline::after_seconds(kConnectSeconds)))
    return problem = fmt::format("no answer for {:g} s", kConnectSeconds), UniqueFd();
  int error = 0;
  socklen_t length = sizeof(error);
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return problem = errno_text(error), UniqueFd();
  send_all(socket, token.data(), token.size(), Deadline::after_seconds(kConnectSeconds));
  return socket;
}

tcp_info info_of(const UniqueFd& socket) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length);
  return info;
}

/// Sends blocks for a while, then waits for the other end's byte: that all have arrived.
double send_for(const UniqueFd& socket, double seconds) {
  const std::vector<char> block(kBlockBytes);
  const auto begin = Clock::now();
  const Deadline deadline = Deadline::after_seconds(kStepSeconds);
  std::uint64_t blocks = 0;
  while (seconds_between(begin, Clock::now()) < seconds) {
    send_all(socket, block.data(), block.size(), deadline);
    ++blocks;
  }
  std::vector<char> end(kBlockBytes, 1);  // the last block says so
  send_all(socket, end.data(), end.size(), deadline);
  ++blocks;
  char byte = 0;
  receive_all(socket, &byte, 1, deadline);
  return static_cast<double>(blocks * kBlockBytes) / seconds_between(begin, Clock::now());
}

void receive_blocks(const UniqueFd& socket) {
  std::vector<char> block(kBlockBytes);
  const Deadline deadline = Deadline::after_seconds(kStepSeconds + kTransferSeconds);
  do {
    receive_all(socket, block.data(), block.size(), deadline);
  } while (block.back() == 0);
  const char byte = 0;
  send_all(socket, &byte, 1, deadline);
}

/// `first`: the lower rank of the two, which measures.
void measure(const UniqueFd& socket, bool first, Link& link) {
  const int one = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  const Deadline deadline = Deadline::after_seconds(kStepSeconds);
  std::vector<double> times;
  char byte = 0;
  for (int i = 0; i < kPings; ++i) {
    if (first) {
      const auto begin = Clock::now();
      send_all(socket, &byte, 1, deadline);
      receive_all(socket, &byte, 1, deadline);
      times.push_back(seconds_between(begin, Clock::now()) * 1e6 / 2);
    } else {
      receive_all(socket, &byte, 1, deadline);
      send_all(socket, &byte, 1, deadline);
    }
  }
  struct Figures {
    double bytes_per_s = 0, sent_again = 0, segments = 0, mtu = 0;
  };
  const auto own = [&](double bytes_per_s) {
    const tcp_info info = info_of(socket);
    return Figures{bytes_per_s, static_cast<double>(info.tcpi_total_retrans), static_cast<double>(info.tcpi_segs_out),
                   static_cast<double>(info.tcpi_pmtu)};
  };
  if (!first) {
    receive_blocks(socket);
    const Figures figures = own(send_for(socket, kTransferSeconds));
    return send_all(socket, reinterpret_cast<const char*>(&figures), sizeof(figures), deadline);
  }
  link.latency_us = median(times);
  link.sent_bytes_per_s = send_for(socket, kTransferSeconds);
  receive_blocks(socket);
  Figures theirs;
  receive_all(socket, reinterpret_cast<char*>(&theirs), sizeof(theirs), deadline);
  const Figures mine = own(link.sent_bytes_per_s);
  link.received_bytes_per_s = theirs.bytes_per_s;
  link.retransmitted = (theirs.sent_again + mine.sent_again) / std::max(1.0, theirs.segments + mine.segments);
  link.mtu = static_cast<int>(std::min(mine.mtu, theirs.mtu));  // each end knows its own interface's
}

// What the lower rank of a pair says of a connection, after the token.
constexpr char kMeasure = 'm', kOnlyTried = 't';

/// Tries all addresses of `places`, and measures the first that answers.
std::vector<Link> measure_from(int rank, int other, const std::vector<Place>& places, std::int64_t own_mbit_s,
                               const std::string& token) {
  std::vector<Link> links;
  std::optional<std::size_t> chosen;
  UniqueFd connection;
  for (const Place& place : places) {
    Link& link = links.emplace_back(Link{.from = rank, .to = other, .address = place.address});
    std::string problem;
    UniqueFd socket;
    try {
      socket = connect_to(place, token, problem);
      const char says = chosen ? kOnlyTried : kMeasure;
      if (socket) send_all(socket, &says, 1, Deadline::after_seconds(kConnectSeconds));
    } catch (const DeviceError& error) {
      problem = error.what();
      socket.reset();
    }
    if (!socket) {
      link.problem = problem;
    } else if (!chosen) {
      chosen = links.size() - 1;
      connection = std::move(socket);
      link.interface_mbit_s = own_mbit_s > 0 ? std::min(own_mbit_s, place.mbit_s) : place.mbit_s;
    }
  }
  if (chosen) {
    try {
      measure(connection, true, links[*chosen]);
    } catch (const DeviceError& error) {
      links[*chosen].problem = error.what();
    }
  }
  // Those that were only tried have no figures.
  std::vector<Link> kept;
  for (std::size_t i = 0; i < links.size(); ++i)
    if (links[i].problem || i == chosen) kept.push_back(std::move(links[i]));
  if (places.empty())
    kept.push_back({.from = rank, .to = other, .address = "?", .problem = "no interface is up there"});
  return kept;
}

/// The other side.
void answer(Listeners& listeners, const std::string& token) {
  if (listeners.places.empty()) return;
  const Deadline deadline = Deadline::after_seconds(kConnectSeconds * static_cast<double>(listeners.places.size()) + 3);
  while (UniqueFd socket = listeners.accept(token, deadline)) {
    char says = 0;
    try {
      receive_all(socket, &says, 1, Deadline::after_seconds(kConnectSeconds));
      if (says == kMeasure) {
        Link none;
        return measure(socket, false, none);
      }
    } catch (const DeviceError&) {
      return;  // the other side reports it
    }
  }
}

/// The partner of `rank` in `round`, so that in `size` - 1 rounds (or `size`, where that is odd) each pair comes once:
/// the circle method of round-robin tournaments. Nothing: nobody.
std::optional<int> partner(int rank, int size, int round) {
  const int players = size + size % 2, turning = players - 1;
  int other = 0;
  if (rank == players - 1) {
    other = round % turning * (players / 2) % turning;  // the solution of 2 · other = round (mod turning)
  } else {
    other = ((round - rank) % turning + turning) % turning;
    if (other == rank) other = players - 1;
  }
  return other < size ? std::optional(other) : std::nullopt;
}

}  // namespace

std::vector<Link> measure_links(const Exchange& others, const std::vector<NetworkInterface>& interfaces,
                                const std::string& root) {
  Listeners listeners(interfaces, root);
  std::int64_t slowest = 0;
  for (const Place& place : listeners.places)
    if (place.mbit_s > 0) slowest = slowest == 0 ? place.mbit_s : std::min(slowest, place.mbit_s);
  const std::string token = others.all_gather(JobSecret::random().text()).front();
  std::vector<std::vector<Place>> places;
  for (const auto& text : others.all_gather(members_as_json(listeners.places).text()))
    places.push_back(members_from_json<std::vector<Place>>(parse_json(text, 2)));

  std::vector<Link> measured;
  const int rank = others.rank, size = others.size, rounds = size + size % 2 - 1;
  for (int round = 0; round < rounds; ++round) {
    if (const auto other = partner(rank, size, round)) {
      if (rank < *other)
        for (Link& link : measure_from(rank, *other, places[static_cast<std::size_t>(*other)], slowest, token))
          measured.push_back(std::move(link));
      else
        answer(listeners, token);
    }
    others.all_gather({});  // all are done with the round
  }
  std::vector<Link> links;
  for (const auto& text : others.all_gather(members_as_json(measured).text()))
    for (Link& link : members_from_json<std::vector<Link>>(parse_json(text, 2))) links.push_back(std::move(link));
  return links;
}

}  // namespace lockstep::doctor
