// Addresses, names and interfaces of IPv4 and IPv6.
#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/scope.h"

namespace lockstep {

/// An address, with a port where it is one of a socket.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  SocketAddress() = default;
  SocketAddress(const sockaddr& address, socklen_t length);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  int port() const;
  /// In network byte order: four bytes, sixteen, or none of other families.
  std::string_view bytes() const;
  /// 127.0.0.0/8, or ::1.
  bool is_loopback() const;
  /// "10.0.0.1", "fd00::1"; "?" where it is none.
  std::string host_text() const;
  /// "10.0.0.1:29500", "[fd00::1]:29500".
  std::string text() const;

  /// Without ports.
  bool has_host_of(const SocketAddress& other) const;
  friend bool operator==(const SocketAddress& a, const SocketAddress& b);
};

/// "host:29500", "[::1]:29500".
std::string host_port_text(const std::string& host, int port);

/// Of this end of a socket, and of the other one; nothing where it is not connected, or closed.
std::optional<SocketAddress> own_address(const UniqueFd& socket);
std::optional<SocketAddress> peer_address(const UniqueFd& socket);

struct Resolved {
  std::vector<SocketAddress> addresses;
  std::string why_not = {};    // "Name or service not known"
  bool answers_later = false;  // the resolver does not answer for now
};
/// The addresses of a name or an address. Blocks as long as the system's resolver does.
Resolved resolve(const std::string& host, int port);
/// Of an address; nothing where `host` is none. Asks nobody.
std::optional<SocketAddress> parse_address(const std::string& host, int port);

struct NetworkInterface {
  std::string name;  // "eth0"
  SocketAddress address;
  int prefix_bits = -1;  // of its network; -1: it has none
  bool is_up = false;
  bool is_loopback = false;
};
/// Each address of each interface of this host. Throws DeviceError.
std::vector<NetworkInterface> list_interfaces();

/// Whether `filter`, a value of LOCKSTEP_SOCKET_IFNAME, has interface `name`: a list of beginnings ("eth,ib"), or with
/// = of whole names ("=eth0,ib0"), or with ^ of those that are left out ("^docker,lo"). An empty one has all.
bool has_interface(std::string_view filter, std::string_view name);

/// The address from which this host would send to `target`; nothing, and errno, where there is no way. Sends nothing.
std::optional<SocketAddress> source_towards(const SocketAddress& target);

/// Why nobody reaches `address` ("127.0.0.1", "::1", or a name of one) on this host, as errno has it: no device, or no
/// route, of which a network namespace begins with none. Nothing: it can be reached, or is no loopback address. Sends
/// nothing.
std::optional<std::string> loopback_problem(const std::string& address);

/// "127.0.0.1", or "::1" where there is IPv6 alone. Throws DeviceError with what to do where there is neither.
std::string loopback_address();

/// A socket that does not block and listens at `address`; none, and errno, where it cannot. The ports of connections
/// that have just ended are no obstacle; somebody who listens is one all the same.
UniqueFd listen_at(const SocketAddress& address);

/// Messages of connection `socket` leave at once. A peer without a word for `idle_s` is asked every `interval_s`, and
/// given up after `count` questions without an answer.
void set_up_connection(const UniqueFd& socket, int idle_s, int interval_s, int count);

/// Whether something has arrived that nobody has read yet.
bool has_bytes(const UniqueFd& socket);

}  // namespace lockstep
