// Over which networks the hosts of a job reach each other. IPv4: Open MPI's daemons and Debian's Open MPI speak no
// other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// An IPv4 address of an interface that is up.
struct Interface {
  std::string name;           // "eth0"
  std::uint32_t address = 0;  // in host byte order
  int prefix_bits = 0;

  std::uint32_t network() const;
  std::string address_text() const;  // "10.0.0.1"
  std::string network_text() const;  // "10.0.0.0/24"
  friend bool operator==(const Interface&, const Interface&) = default;
};

/// Those of this host, without loopback. Throws DeviceError.
std::vector<Interface> read_interfaces();

/// "eth0/10.0.0.1/24,ib0/10.1.0.1/16", and back; what does not parse is left out.
std::string interfaces_text(std::span<const Interface> interfaces);
std::vector<Interface> parse_interfaces(std::string_view text);

struct Networks {
  std::vector<std::string> common;     // "10.0.0.0/24": every host has an address of its own there
  std::vector<std::string> ambiguous;  // several hosts have the same address there: bridges of containers, for one
};

/// `hosts`: the interfaces of each.
Networks compare_networks(std::span<const std::vector<Interface>> hosts);

/// The address in `network` among these; nothing if there is none.
std::optional<std::string> address_in(std::span<const Interface> interfaces, const std::string& network);

}  // namespace lockstep::launcher
