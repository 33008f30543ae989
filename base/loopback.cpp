#include "base/loopback.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cerrno>
#include <memory>

#include "base/error.h"
#include "base/unique_fd.h"

namespace lockstep {
namespace {

/// 0, or errno. A datagram socket's connect() looks for a route and sends nothing.
int error_of(const addrinfo& address) {
  const UniqueFd socket(::socket(address.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  return ::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
}

}  // namespace

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

std::optional<std::string> loopback_problem(const std::string& address) {
  const bool named = address == "localhost";
  addrinfo hints = {};
  hints.ai_flags = named ? 0 : AI_NUMERICHOST;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), "9", &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, ::freeaddrinfo);
  int error = 0;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (!is_loopback(*at->ai_addr)) return std::nullopt;
    error = error_of(*at);
    // Others, such as a lack of descriptors, say nothing about the network.
    if (error != ENETUNREACH && error != EHOSTUNREACH && error != EADDRNOTAVAIL && error != EINVAL &&
        error != EAFNOSUPPORT)
      return std::nullopt;
  }
  return error != 0 ? std::optional(errno_text(error)) : std::nullopt;
}

std::string loopback_address() {
  std::string first;
  for (const char* const address : {"127.0.0.1", "::1"}) {
    const auto problem = loopback_problem(address);
    if (!problem) return address;
    if (first.empty()) first = *problem;
  }
  throw DeviceError(
      fmt::format("ranks of one host find each other over its loopback network, which is not there: 127.0.0.1: {}",
                  first),
      "bring it up: ip link set lo up");
}

}  // namespace lockstep
