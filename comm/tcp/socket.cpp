#include "comm/tcp/socket.h"

#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "base/error.h"
#include "base/network.h"
#include "base/signals.h"
#include "base/text.h"
#include "comm/stall.h"

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

using Addresses = std::vector<SocketAddress>;

/// Of `host`, which stands in `variable`. Where the resolver does not answer for now it is asked again until
/// `deadline`.
Addresses resolve(const char* variable, const std::string& host, int port, Deadline deadline) {
  for (;;) {
    Resolved found = lockstep::resolve(host, port);
    if (!found.addresses.empty()) return std::move(found.addresses);
    if (!found.answers_later || deadline.expired())
      throw UsageError(fmt::format("{}=\"{}\" has no address: {}", variable, host, found.why_not),
                       std::string_view(variable) == kListen
                           ? "set LOCKSTEP_LISTEN to an address of rank 0's host, or to 0.0.0.0 for all of them"
                           : "set MASTER_ADDR to the name or address of rank 0's host, or unset it if all ranks are on "
                             "one");
    throw_if_stopped("looking MASTER_ADDR up");
    ::poll(nullptr, 0, std::chrono::duration_cast<Millis>(kLongestPause).count());
  }
}

[[noreturn]] void fail_to_listen(const SocketAddress& address, int error_number) {
  const std::string where = address.text();
  if (error_number == EADDRINUSE)
    throw UsageError(fmt::format("rank 0 cannot listen at {}: port {} is in use", where, address.port()),
                     "set MASTER_PORT to a free port on all ranks, or end what uses this one (another job, or a second "
                     "process with RANK=0)");
  if (error_number == EACCES || error_number == EPERM)
    throw UsageError(fmt::format("rank 0 may not listen at {}: {}", where, errno_text(error_number)),
                     "set MASTER_PORT to a port from 1024 on, on all ranks");
  throw DeviceError(fmt::format("rank 0 cannot listen at {}: {}", where, errno_text(error_number)),
                    "set MASTER_ADDR to an address of rank 0's host");
}

/// Adds sockets for all addresses that this machine has.
void listen_at_all(const Addresses& addresses, std::vector<UniqueFd>& sockets) {
  for (auto at = addresses.begin(); at != addresses.end(); ++at) {
    if (std::find(addresses.begin(), at, *at) != at) continue;  // a name may stand for one address twice
    if (UniqueFd socket = lockstep::listen_at(*at)) {
      sockets.push_back(std::move(socket));
    } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
      fail_to_listen(*at, errno);
    }
  }
}

std::string list_of(const Addresses& addresses) {
  std::vector<std::string> texts;
  for (const SocketAddress& address : addresses) texts.push_back(address.host_text());
  return join(texts, ", ");
}

/// Loopback, and meant: an address, or the name that says so.
bool says_loopback(const std::string& host) {
  if (host == "localhost" || host.starts_with("localhost.") || host == "ip6-localhost") return true;
  const auto address = parse_address(host, 0);
  return address && address->is_loopback();
}

/// Nothing, and errno, where nobody accepts before `deadline`.
std::optional<UniqueFd> connect_to_one(const SocketAddress& address, Deadline deadline) {
  UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return std::nullopt;
  if (::connect(socket.get(), address.get(), address.length) != 0) {
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
  // Without a listener, Linux connects a socket to itself if the socket happens to get the requested port.
  if (own_address(socket) == peer_address(socket)) {
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

std::string text_of(const Rendezvous& rendezvous) { return host_port_text(rendezvous.host, rendezvous.port); }

std::vector<UniqueFd> listen_at(const Rendezvous& rendezvous, bool several_hosts) {
  const auto deadline = Deadline::after(kResolveWithin);
  std::vector<UniqueFd> sockets;
  // Also where it is not used: a name that does not resolve keeps the others away, and rank 0 would wait for them.
  const Addresses addresses = resolve(kMasterAddress, rendezvous.host, rendezvous.port, deadline);
  if (!rendezvous.listen.empty()) {
    std::string all;
    for (const std::string& host : split(rendezvous.listen, ',')) {
      const Addresses own = resolve(kListen, std::string(trim(host)), rendezvous.port, deadline);
      listen_at_all(own, sockets);
      all += (all.empty() ? "" : ", ") + list_of(own);
    }
    if (sockets.empty())
      throw UsageError(fmt::format("LOCKSTEP_LISTEN=\"{}\" ({}) is no address of this machine, where rank 0 runs",
                                   rendezvous.listen, all),
                       "set it to one that `ip address` shows there, or to 0.0.0.0 for all of them");
    return sockets;
  }
  listen_at_all(addresses, sockets);
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
    const auto own = own_address(listener);
    return own && own->is_loopback();
  });
}

UniqueFd connect_to(const Rendezvous& rendezvous, Deadline deadline, bool speaks) {
  const auto begin = Clock::now();
  const Addresses addresses = resolve(kMasterAddress, rendezvous.host, rendezvous.port, deadline);
  Clock::duration pause = kFirstPause;
  StallNotice stall;
  for (;;) {
    std::string complaint;
    for (const SocketAddress& address : addresses) {
      const auto attempt = std::min<Clock::duration>(kOneAttempt, deadline.remaining());
      if (auto socket = connect_to_one(address, Deadline::after(attempt))) return *std::move(socket);
      complaint = fmt::format("{}: {}", address.text(), errno_text(errno));
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

void set_up(const UniqueFd& socket) { set_up_connection(socket, 15, 5, 3); }

}  // namespace lockstep::comm
