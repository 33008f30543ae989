#include "comm/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/loopback.h"
#include "base/stop.h"
#include "base/text.h"
#include "comm/wait.h"

namespace lockstep::comm {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(5);
constexpr auto kLongestPause = std::chrono::milliseconds(500);
// Between two looks at stop requests.
constexpr auto kConnectNap = std::chrono::milliseconds(50);
// A host that does not even refuse (a firewall, a host that is down) must not use up the whole deadline: its other
// addresses, and rank 0 that starts meanwhile, get their turn.
constexpr auto kOneAttempt = std::chrono::seconds(10);
constexpr auto kResolveWithin = std::chrono::seconds(10);

constexpr const char* kMasterAddress = "MASTER_ADDR";
constexpr const char* kListen = "LOCKSTEP_LISTEN";

struct AddressesDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, AddressesDeleter>;

/// nullptr and an error code of getaddrinfo's where there are none.
std::pair<Addresses, int> look_up(const char* host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  return {Addresses(code == 0 ? list : nullptr), code};
}

/// Of `host`, which stands in `variable`. Where the resolver does not answer for now it is asked again until
/// `deadline`.
Addresses resolve(const char* variable, const std::string& host, int port, Deadline deadline) {
  for (;;) {
    auto [addresses, code] = look_up(host.c_str(), port, 0);
    if (addresses != nullptr) return std::move(addresses);
    if (code != EAI_AGAIN || deadline.expired())
      throw UsageError(fmt::format("{}=\"{}\" has no address: {}", variable, host,
                                   code == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(code)),
                       std::string_view(variable) == kListen
                           ? "set LOCKSTEP_LISTEN to an address of rank 0's host, or to 0.0.0.0 for all of them"
                           : "set MASTER_ADDR to the name or address of rank 0's host, or unset it if all ranks are on "
                             "one");
    throw_if_stopped("looking MASTER_ADDR up");
    ::poll(nullptr, 0, std::chrono::duration_cast<Millis>(kLongestPause).count());
  }
}

std::string text_of(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "?";
  return address->sa_family == AF_INET6 ? fmt::format("[{}]:{}", host.data(), port.data())
                                        : fmt::format("{}:{}", host.data(), port.data());
}

void set_option(const UniqueFd& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

/// What every connection gets: small messages leave at once, and a host that dies without a word is noticed.
void set_up(const UniqueFd& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

/// Nothing, and errno, where `address` cannot be listened at.
std::optional<UniqueFd> listen_at_one(const addrinfo& address) {
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return std::nullopt;
  // The ports of connections that have just ended are no obstacle; somebody who listens is one all the same.
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.ai_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (::bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0)
    return std::nullopt;
  return socket;
}

[[noreturn]] void fail_to_listen(const sockaddr* address, socklen_t length, int port, int error_number) {
  const std::string where = text_of(address, length);
  if (error_number == EADDRINUSE)
    throw UsageError(fmt::format("rank 0 cannot listen at {}: port {} is in use", where, port),
                     "set MASTER_PORT to a free port on all ranks, or end what uses this one (another job, or a second "
                     "process with RANK=0)");
  if (error_number == EACCES || error_number == EPERM)
    throw UsageError(fmt::format("rank 0 may not listen at {}: {}", where, errno_text(error_number)),
                     "set MASTER_PORT to a port from 1024 on, on all ranks");
  throw DeviceError(fmt::format("rank 0 cannot listen at {}: {}", where, errno_text(error_number)),
                    "set MASTER_ADDR to an address of rank 0's host");
}

/// Adds sockets for all addresses that this machine has.
void listen_at_all(const Addresses& addresses, int port, std::vector<UniqueFd>& sockets) {
  std::vector<std::string> seen;  // a name may stand for one address twice
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    const std::string text = text_of(at->ai_addr, at->ai_addrlen);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
    seen.push_back(text);
    if (auto socket = listen_at_one(*at)) {
      sockets.push_back(*std::move(socket));
    } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
      fail_to_listen(at->ai_addr, at->ai_addrlen, port, errno);
    }
  }
}

std::string list_of(const Addresses& addresses) {
  std::string list;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    std::array<char, NI_MAXHOST> host{};
    if (::getnameinfo(at->ai_addr, at->ai_addrlen, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    list += (list.empty() ? "" : ", ") + std::string(host.data());
  }
  return list;
}

/// Loopback, and meant: an address, or the name that says so.
bool says_loopback(const std::string& host) {
  if (host == "localhost" || host.starts_with("localhost.") || host == "ip6-localhost") return true;
  const auto address = look_up(host.c_str(), 0, AI_NUMERICHOST).first;
  return address != nullptr && is_loopback(*address->ai_addr);
}

/// Without a listener, Linux connects a socket to itself if the socket happens to get the requested port.
bool is_connected_to_itself(const UniqueFd& socket) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof own, peer_length = sizeof peer;
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

/// Nothing, and errno, where nobody accepts before `deadline`.
std::optional<UniqueFd> connect_to_one(const addrinfo& address, Deadline deadline) {
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return std::nullopt;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return std::nullopt;
    pollfd look{socket.get(), POLLOUT, 0};
    while (::poll(&look, 1, std::chrono::duration_cast<Millis>(kConnectNap).count()) <= 0) {
      throw_if_stopped("joining the other ranks");
      if (deadline.expired()) {
        errno = ETIMEDOUT;
        return std::nullopt;
      }
    }
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      errno = error;
      return std::nullopt;
    }
  }
  if (is_connected_to_itself(socket)) {
    errno = ECONNREFUSED;
    return std::nullopt;
  }
  set_up(socket);
  return socket;
}

void sleep_for(Clock::duration pause) {
  const auto end = Clock::now() + pause;
  for (auto now = Clock::now(); now < end; now = Clock::now()) {
    throw_if_stopped("joining the other ranks");
    const auto nap = std::min<Clock::duration>(end - now, kConnectNap);
    ::poll(nullptr, 0, std::max(1, static_cast<int>(std::chrono::duration_cast<Millis>(nap).count())));
  }
}

}  // namespace

std::string text_of(const Rendezvous& rendezvous) {
  return rendezvous.host.find(':') == std::string::npos ? fmt::format("{}:{}", rendezvous.host, rendezvous.port)
                                                        : fmt::format("[{}]:{}", rendezvous.host, rendezvous.port);
}

std::vector<UniqueFd> listen_at(const Rendezvous& rendezvous, bool several_hosts) {
  const auto deadline = Deadline::after(kResolveWithin);
  std::vector<UniqueFd> sockets;
  // Also where it is not used: a name that does not resolve keeps the others away, and rank 0 would wait for them.
  const Addresses addresses = resolve(kMasterAddress, rendezvous.host, rendezvous.port, deadline);
  if (!rendezvous.listen.empty()) {
    std::string all;
    for (const std::string& host : split(rendezvous.listen, ',')) {
      const Addresses own = resolve(kListen, std::string(trim(host)), rendezvous.port, deadline);
      listen_at_all(own, rendezvous.port, sockets);
      all += (all.empty() ? "" : ", ") + list_of(own);
    }
    if (sockets.empty())
      throw UsageError(fmt::format("LOCKSTEP_LISTEN=\"{}\" ({}) is no address of this machine, where rank 0 runs",
                                   rendezvous.listen, all),
                       "set it to one that `ip address` shows there, or to 0.0.0.0 for all of them");
    return sockets;
  }
  listen_at_all(addresses, rendezvous.port, sockets);
  if (sockets.empty())
    throw UsageError(
        fmt::format("MASTER_ADDR=\"{}\" ({}) is no address of this machine, where rank 0 runs", rendezvous.host,
                    list_of(addresses)),
        "run rank 0 there; or, where a service or router passes connections on, set LOCKSTEP_LISTEN to the "
        "address at which rank 0 is to listen (0.0.0.0: all of this machine)");
  if (several_hosts && are_loopback(sockets) && !says_loopback(rendezvous.host))
    throw UsageError(fmt::format("MASTER_ADDR=\"{}\" is {} on rank 0's host: no other host can reach it",
                                 rendezvous.host, list_of(addresses)),
                     "set MASTER_ADDR to rank 0's address in the network, or LOCKSTEP_LISTEN to the address at which "
                     "it is to listen");
  return sockets;
}

bool are_loopback(const std::vector<UniqueFd>& listeners) {
  return std::ranges::all_of(listeners, [](const UniqueFd& listener) {
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    return ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
           is_loopback(reinterpret_cast<const sockaddr&>(own));
  });
}

UniqueFd connect_to(const Rendezvous& rendezvous, Deadline deadline, bool speaks) {
  const auto begin = Clock::now();
  const Addresses addresses = resolve(kMasterAddress, rendezvous.host, rendezvous.port, deadline);
  Clock::duration pause = kFirstPause;
  StallNotice stall;
  for (;;) {
    std::string complaint;
    for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
      const auto attempt = std::min<Clock::duration>(kOneAttempt, deadline.remaining());
      if (auto socket = connect_to_one(*at, Deadline::after(attempt))) return *std::move(socket);
      complaint = fmt::format("{}: {}", text_of(at->ai_addr, at->ai_addrlen), errno_text(errno));
    }
    if (deadline.expired())
      throw TimeoutError(
          fmt::format("rank 0 did not come to {} (MASTER_ADDR:MASTER_PORT) within {:.3g} s: {}", text_of(rendezvous),
                      seconds_between(begin, Clock::now()), complaint),
          "start rank 0, and give all ranks the same MASTER_ADDR and MASTER_PORT; --timeout-seconds waits "
          "longer");
    if (stall.is_due(0, Clock::now()) && speaks)
      warn_of_stall(
          "joining the other ranks", stall.waited_seconds(),
          fmt::format("rank 0, which is to be at {} (MASTER_ADDR:MASTER_PORT; {})", text_of(rendezvous), complaint));
    sleep_for(std::min<Clock::duration>(pause, deadline.remaining()));
    pause = std::min<Clock::duration>(pause * 3 / 2, kLongestPause);
  }
}

UniqueFd accept_from(const UniqueFd& listener) {
  UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    set_up(socket);
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    throw DeviceError(fmt::format("rank 0 cannot accept a connection: {}", errno_text(errno)), "raise ulimit -n");
  }
  return socket;
}

bool has_bytes(const UniqueFd& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

std::string peer_text(const UniqueFd& socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) return "?";
  return text_of(reinterpret_cast<const sockaddr*>(&peer), length);
}

}  // namespace lockstep::comm
