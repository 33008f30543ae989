#include "launcher/hosts/networks.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/network.h"
#include "base/text.h"

namespace lockstep::launcher {
namespace {

constexpr int kAddressBits = 32;

std::uint32_t mask_of(int prefix_bits) { return prefix_bits <= 0 ? 0 : ~0u << (kAddressBits - prefix_bits); }

std::string dotted(std::uint32_t address) {
  return fmt::format("{}.{}.{}.{}", address >> 24, address >> 16 & 0xff, address >> 8 & 0xff, address & 0xff);
}

}  // namespace

std::uint32_t Interface::network() const { return address & mask_of(prefix_bits); }
std::string Interface::address_text() const { return dotted(address); }
std::string Interface::network_text() const { return fmt::format("{}/{}", dotted(network()), prefix_bits); }

std::vector<Interface> read_interfaces() {
  std::vector<Interface> interfaces;
  for (const NetworkInterface& one : list_interfaces())
    if (one.is_up && !one.is_loopback && one.address.family() == AF_INET && one.prefix_bits >= 0)
      interfaces.push_back(
          {one.name, ntohl(reinterpret_cast<const sockaddr_in*>(one.address.get())->sin_addr.s_addr), one.prefix_bits});
  return interfaces;
}

std::string interfaces_text(std::span<const Interface> interfaces) {
  std::vector<std::string> texts;
  for (const auto& each : interfaces)
    texts.push_back(fmt::format("{}/{}/{}", each.name, each.address_text(), each.prefix_bits));
  return join(texts, ",");
}

std::vector<Interface> parse_interfaces(std::string_view text) {
  std::vector<Interface> interfaces;
  for (const auto& word : split(text, ',')) {
    const auto parts = split(word, '/');
    in_addr address = {};
    if (parts.size() != 3 || ::inet_pton(AF_INET, parts[1].c_str(), &address) != 1) continue;
    const auto bits = parse_int(parts[2]);
    if (!bits || *bits < 0 || *bits > kAddressBits) continue;
    interfaces.push_back({parts[0], ntohl(address.s_addr), static_cast<int>(*bits)});
  }
  return interfaces;
}

Networks compare_networks(std::span<const std::vector<Interface>> hosts) {
  struct Seen {
    std::set<std::size_t> hosts;
    std::map<std::uint32_t, std::set<std::size_t>> by_address;
  };
  std::vector<std::string> order;  // as the first host lists them
  std::map<std::string, Seen> networks;
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    for (const auto& each : hosts[h]) {
      // A network of one address joins nobody (containers that are routed to each other).
      if (each.prefix_bits >= kAddressBits) continue;
      const std::string text = each.network_text();
      if (!networks.contains(text)) order.push_back(text);
      networks[text].hosts.insert(h);
      networks[text].by_address[each.address].insert(h);
    }
  }
  Networks result;
  for (const auto& text : order) {
    const Seen& seen = networks[text];
    const bool shared = std::ranges::any_of(seen.by_address, [](const auto& entry) { return entry.second.size() > 1; });
    if (shared) {
      result.ambiguous.push_back(text);
    } else if (seen.hosts.size() == hosts.size()) {
      result.common.push_back(text);
    }
  }
  return result;
}

std::optional<std::string> address_in(std::span<const Interface> interfaces, const std::string& network) {
  const auto found = std::ranges::find(interfaces, network, &Interface::network_text);
  if (found == interfaces.end()) return std::nullopt;
  return found->address_text();
}

}  // namespace lockstep::launcher
