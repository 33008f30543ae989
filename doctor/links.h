// Measures the connections between the hosts of a job.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "doctor/hosts.h"

namespace lockstep::doctor {

/// What the processes that look at hosts, one each, say to each other. They need reach rank 0 alone: whether they reach
/// each other is to be found out.
struct Exchange {
  int rank = 0, size = 1;
  /// Collective: each one's text, by rank.
  std::function<std::vector<std::string>(const std::string& mine)> all_gather;
};

/// Collective, with this host's `interfaces`. Every pair connects, the lower
/// rank to each address of the higher one, and measures the first that works for about half a second, pairs without a
/// host in common at the same time. All ranks return all links, by pair; addresses that nobody reached are links with a
/// problem. Connections are known by a token that came through the exchange.
std::vector<Link> measure_links(const Exchange& others, const std::vector<NetworkInterface>& interfaces,
                                const std::string& root);

}  // namespace lockstep::doctor
