#include "base/network.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

Resolved look_up(const std::string& host, int port, int flags) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) return {{}, code == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(code), code == EAI_AGAIN};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  Resolved found;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next)
    found.addresses.emplace_back(*at->ai_addr, at->ai_addrlen);
  return found;
}

SocketAddress of_interface(const sockaddr& address) {
  return {address, static_cast<socklen_t>(address.sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6))};
}

int prefix_bits_of(const sockaddr* mask) {
  if (mask == nullptr) return -1;
  int bits = 0;
  const SocketAddress address = of_interface(*mask);
  for (const char byte : address.bytes()) bits += std::popcount(static_cast<unsigned char>(byte));
  return bits;
}

void set_option(const UniqueFd& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr& address, socklen_t address_length) : length(address_length) {
  std::memcpy(&storage, &address, length);
}

int SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  return family() == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port) : 0;
}

std::string_view SocketAddress::bytes() const {
  const auto view = [](const auto& address) {
    return std::string_view(reinterpret_cast<const char*>(&address), sizeof address);
  };
  if (family() == AF_INET) return view(reinterpret_cast<const sockaddr_in&>(storage).sin_addr);
  return family() == AF_INET6 ? view(reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr) : std::string_view();
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return bytes()[0] == 127;
  return family() == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

std::string SocketAddress::host_text() const {
  std::array<char, NI_MAXHOST> host{};
  const bool known = ::getnameinfo(get(), length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0;
  return known ? host.data() : "?";
}

std::string SocketAddress::text() const {
  const std::string host = host_text();
  return host == "?" ? host : host_port_text(host, port());
}

bool SocketAddress::has_host_of(const SocketAddress& other) const {
  return !bytes().empty() && family() == other.family() && bytes() == other.bytes();
}

bool operator==(const SocketAddress& a, const SocketAddress& b) {
  return a.length == b.length && std::memcmp(&a.storage, &b.storage, a.length) == 0;
}

std::string host_port_text(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

std::optional<SocketAddress> own_address(const UniqueFd& socket) {
  SocketAddress own;
  if (::getsockname(socket.get(), own.get(), &own.length) != 0) return std::nullopt;
  return own;
}

std::optional<SocketAddress> peer_address(const UniqueFd& socket) {
  SocketAddress peer;
  if (::getpeername(socket.get(), peer.get(), &peer.length) != 0) return std::nullopt;
  return peer;
}

Resolved resolve(const std::string& host, int port) { return look_up(host, port, 0); }

std::optional<SocketAddress> parse_address(const std::string& host, int port) {
  const Resolved found = look_up(host, port, AI_NUMERICHOST);
  return found.addresses.empty() ? std::nullopt : std::optional(found.addresses[0]);
}

std::vector<NetworkInterface> list_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw DeviceError(fmt::format("listing network interfaces: {}", errno_text(errno)));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<NetworkInterface> all;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    const int family = at->ifa_addr == nullptr ? AF_UNSPEC : at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    all.push_back({at->ifa_name, of_interface(*at->ifa_addr), prefix_bits_of(at->ifa_netmask),
                   (at->ifa_flags & IFF_UP) != 0, (at->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return all;
}

bool has_interface(std::string_view filter, std::string_view name) {
  if (filter.empty()) return true;
  const bool excludes = filter.starts_with('^');
  if (excludes) filter.remove_prefix(1);
  const bool exact = filter.starts_with('=');
  if (exact) filter.remove_prefix(1);
  const bool listed = std::ranges::any_of(split(std::string(filter), ','), [&](const std::string& item) {
    return !item.empty() && (exact ? name == item : name.starts_with(item));
  });
  return listed != excludes;
}

std::optional<SocketAddress> source_towards(const SocketAddress& target) {
  // A datagram socket's connect() looks for a route and sends nothing.
  const UniqueFd socket(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), target.get(), target.length) != 0) return std::nullopt;
  return own_address(socket);
}

std::optional<std::string> loopback_problem(const std::string& address) {
  std::vector<SocketAddress> addresses;
  if (address == "localhost")
    addresses = resolve(address, 9).addresses;
  else if (const auto parsed = parse_address(address, 9))
    addresses = {*parsed};
  int error = 0;
  for (const SocketAddress& one : addresses) {
    if (!one.is_loopback()) return std::nullopt;
    error = source_towards(one) ? 0 : errno;
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

UniqueFd listen_at(const SocketAddress& address) {
  UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    const int why = errno;
    socket.reset();
    errno = why;
  }
  return socket;
}

void set_up_connection(const UniqueFd& socket, int idle_s, int interval_s, int count) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, count);
}

bool has_bytes(const UniqueFd& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

}  // namespace lockstep
