// At which addresses this host can be reached.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"

namespace lockstep::comm {

/// An address of one of this host's network interfaces, without a port.
struct InterfaceAddress {
  std::string interface;
  sockaddr_storage address{};
  socklen_t length = 0;

  /// "10.0.0.1", "fd00::1".
  std::string text() const;
};

/// Whether `filter`, a value of LOCKSTEP_SOCKET_IFNAME, has interface `name`: a list of beginnings ("eth,ib"), or with
/// = of whole names ("=eth0,ib0"), or with ^ of those that are left out ("^docker,lo").
bool has_interface(std::string_view filter, std::string_view name);

/// The addresses to try, best first. With LOCKSTEP_SOCKET_IFNAME: those of the interfaces that it names; UsageError
/// where there are none. Without: the one from which this host reaches `meeting` (a name or an address; empty: none),
/// then those of all other interfaces that are up, bridges of containers last; loopback only if there is nothing else,
/// or if `meeting` is there. Addresses that hold for one link only (fe80::) do not count.
std::vector<InterfaceAddress> usable_addresses(const EnvLookup& lookup, const std::string& meeting);

}  // namespace lockstep::comm
