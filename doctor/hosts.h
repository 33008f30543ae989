// What hosts have to have in common, and what lies between them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "doctor/host.h"

namespace lockstep::doctor {

/// What one host says to be compared with the others.
struct HostFacts {
  std::string host;
  struct Fact {
    std::string name, value;
    bool needed = false;  // else hosts that differ are only unequal
    void members(auto& io) { io("name", name, "value", value, "needed", needed); }
    friend bool operator==(const Fact&, const Fact&) = default;
  };
  std::vector<Fact> facts;  // the same names in the same order on every host
  /// Its clock minus rank 0's, in seconds; half of the way there and back is the error.
  double clock_offset_s = 0, clock_error_s = 0;
};
/// This host's, but for the clock.
HostFacts facts_of(const View& view, const std::string& gpu_libraries);

/// Names hosts that differ from most, and clocks that are apart.
std::vector<Finding> compare_hosts(std::span<const HostFacts> hosts);

/// One connection, from host `from` to host `to`.
struct Link {
  int from = 0, to = 0;
  std::string address;                                    // of `to`
  std::optional<std::string> problem = {};                // "Connection refused": there is no figure then
  double latency_us = 0;                                  // half of a byte's way there and back, the median
  double sent_bytes_per_s = 0, received_bytes_per_s = 0;  // one way at a time
  double retransmitted = 0;                               // share of the segments that `from` and `to` sent
  int mtu = 0;                                            // of the path, as the kernel knows it; 0: it does not say
  std::int64_t interface_mbit_s = 0;                      // of the slower end's interface; 0: it does not say
  void members(auto& io) {
    io("from", from, "to", to, "address", address, "problem", problem, "latency_us", latency_us, "sent_bytes_per_s",
       sent_bytes_per_s, "received_bytes_per_s", received_bytes_per_s, "retransmitted", retransmitted, "mtu", mtu,
       "interface_mbit_s", interface_mbit_s);
  }
};

/// Links that fail, lose, or are slower than their interfaces and than the others.
std::vector<Finding> check_links(std::span<const Link> links, std::span<const std::string> hosts);

/// Rows and columns are hosts: bandwidth in Gbit/s above the diagonal, latency in µs below it. Ends with a newline.
std::string matrix_of(std::span<const Link> links, std::span<const std::string> hosts);

}  // namespace lockstep::doctor
