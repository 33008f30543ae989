// Measures the connections between the hosts of a job.
#pragma once

#include <vector>

#include "base/json.h"
#include "doctor/hosts.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::doctor {

/// Collective; of the ranks of `group`, one per host, with this host's `interfaces`. Every pair connects, the lower
/// rank to each address of the higher one, and measures the first that works for about half a second, pairs without a
/// host in common at the same time. All ranks return all links, by pair; addresses that nobody reached are links with a
/// problem. Connections prove the job's secret to each other by a token that came through the group.
std::vector<Link> measure_links(comm::ProcessGroup& group, const std::vector<NetworkInterface>& interfaces,
                                const std::string& root);

JsonText json_of(const Link& link);

}  // namespace lockstep::doctor
