#include "comm/hosts/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "base/unique_fd.h"

namespace lockstep::comm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_SOCKET_IFNAME";

/// Made by container engines and hypervisors for what runs on this machine: others may have one of the same address.
constexpr std::array kInnerInterfaces = {"docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc"};

bool is_inner(const std::string& name) {
  return std::any_of(kInnerInterfaces.begin(), kInnerInterfaces.end(),
                     [&](const char* prefix) { return name.starts_with(prefix); });
}

bool is_link_local(const sockaddr* address) {
  if (address->sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

struct Found {
  InterfaceAddress address;
  bool loopback = false;
};

std::vector<Found> all_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw DeviceError(fmt::format("listing network interfaces: {}", errno_text(errno)));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<Found> all;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int family = at->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || is_link_local(at->ifa_addr)) continue;
    Found& found = all.emplace_back();
    found.address.interface = at->ifa_name;
    found.address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&found.address.address, at->ifa_addr, found.address.length);
    found.loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
  }
  return all;
}

bool same_address(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  return std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

/// The address that the kernel would send to `host` from; nothing is sent.
std::optional<sockaddr_storage> source_towards(const std::string& host) {
  if (host.empty()) return std::nullopt;
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    const UniqueFd socket(::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage source{};
    socklen_t length = sizeof source;
    if (socket && ::connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&source), &length) == 0)
      return source;
  }
  return std::nullopt;
}

}  // namespace

std::string InterfaceAddress::text() const {
  std::array<char, NI_MAXHOST> host{};
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host.data(), host.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0)
    return "?";
  return host.data();
}

bool has_interface(std::string_view filter, std::string_view name) {
  const bool excludes = filter.starts_with('^');
  if (excludes) filter.remove_prefix(1);
  const bool exact = filter.starts_with('=');
  if (exact) filter.remove_prefix(1);
  bool listed = false;
  for (const std::string& item : split(std::string(filter), ','))
    if (!item.empty() && (exact ? name == item : name.starts_with(item))) listed = true;
  return listed != excludes;
}

std::vector<InterfaceAddress> usable_addresses(const EnvLookup& lookup, const std::string& meeting) {
  std::vector<Found> all = all_addresses();
  std::vector<InterfaceAddress> chosen;
  if (const auto filter = lookup(kVariable); filter && !filter->empty()) {
    std::string names;
    for (const Found& found : all) {
      if (has_interface(*filter, found.address.interface)) chosen.push_back(found.address);
      if (names.find(found.address.interface) == std::string::npos)
        names += (names.empty() ? "" : ", ") + found.address.interface;
    }
    if (chosen.empty())
      throw UsageError(
          fmt::format("{}=\"{}\" names no interface of this host that is up and has an address", kVariable, *filter),
          names.empty() ? "look at this host's network" : fmt::format("here are {}", names));
    return chosen;
  }
  const auto source = source_towards(meeting);
  const auto rank = [&](const Found& found) {
    if (source && same_address(*source, found.address.address)) return 0;
    if (found.loopback) return 3;
    return is_inner(found.address.interface) ? 2 : 1;
  };
  std::stable_sort(all.begin(), all.end(), [&](const Found& a, const Found& b) { return rank(a) < rank(b); });
  for (const Found& found : all)
    if (rank(found) < 3 || chosen.empty()) chosen.push_back(found.address);
  if (chosen.empty()) throw DeviceError("this host has no network address", "look at its network");
  return chosen;
}

}  // namespace lockstep::comm
