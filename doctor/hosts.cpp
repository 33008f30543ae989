#include "doctor/hosts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/cpu.h"
#include "base/statistics.h"
#include "base/text.h"
#include "base/version.h"

namespace lockstep::doctor {
namespace {

constexpr double kGbit = 1e9 / 8;

/// Of the values, the one that most have; of several such the first host's.
std::string most_common(std::span<const HostFacts> hosts, std::size_t fact) {
  std::map<std::string, int> counts;
  for (const HostFacts& host : hosts) ++counts[host.facts[fact].value];
  const HostFacts& best =
      *std::ranges::max_element(hosts, {}, [&](const HostFacts& host) { return counts[host.facts[fact].value]; });
  return best.facts[fact].value;
}

std::string link_name(const Link& link, std::span<const std::string> hosts) {
  return fmt::format("{} to {} ({})", printable(hosts[static_cast<std::size_t>(link.from)]),
                     printable(hosts[static_cast<std::size_t>(link.to)]), link.address);
}

}  // namespace

HostFacts facts_of(const View& view, const std::string& gpu_libraries) {
  std::vector<std::string> gpus;
  for (const auto& gpu : view.gpus.list) gpus.push_back(gpu.name.value_or("a GPU"));
  const devices::Cpu cpu = devices::read_cpu();
  return {.host = view.host_name,
          .facts = {{"lockstep", fmt::format("{} ({})", version(), git_revision()), true},
                    {"instructions", cpu_instruction_set(), true},
                    {"libraries of GPUs", gpu_libraries, true},
                    {"CPU", cpu.model.value_or("unknown")},
                    {"processors that may be used", fmt::to_string(view.allowed.count())},
                    {"GPUs", gpus.empty() ? "none" : join(gpus, ", ")},
                    {"GPU driver", view.gpus.driver_version.value_or("none")}}};
}

std::vector<Finding> compare_hosts(std::span<const HostFacts> hosts) {
  std::vector<Finding> findings;
  for (std::size_t i = 0; i < hosts.front().facts.size(); ++i) {
    const auto& fact = hosts.front().facts[i];
    const std::string usual = most_common(hosts, i);
    std::vector<std::string> others;
    for (const HostFacts& host : hosts)
      if (host.facts[i].value != usual)
        others.push_back(fmt::format("{} has {}", printable(host.host), printable(host.facts[i].value)));
    if (others.empty()) {
      findings.push_back({"equal", Severity::kOk, fmt::format("{}: {}", fact.name, printable(usual))});
      continue;
    }
    findings.push_back({"equal", fact.needed ? Severity::kFailure : Severity::kWarning,
                        fmt::format("{}: {}, where the others have {}", fact.name, listed(others), printable(usual)),
                        fact.needed
                            ? "install the same build on every host, and leave out hosts of another kind: results "
                              "of other instructions have other bits"
                            : "a job takes a step in the time of its slowest rank: group equal hosts"});
  }
  bool together = true;
  for (const HostFacts& host : hosts) {
    if (std::abs(host.clock_offset_s) <= 0.5 + host.clock_error_s) continue;
    together = false;
    findings.push_back(
        {"clocks", Severity::kWarning,
         fmt::format("the clock of {} is {:.1f} s {} that of {}", printable(host.host), std::abs(host.clock_offset_s),
                     host.clock_offset_s > 0 ? "after" : "before", printable(hosts.front().host)),
         "start chrony or systemd-timesyncd on every host"});
  }
  if (together) findings.push_back({"clocks", Severity::kOk, "clocks agree"});
  return findings;
}

std::vector<Finding> check_links(std::span<const Link> links, std::span<const std::string> hosts) {
  std::vector<Finding> findings;
  std::vector<double> speeds, latencies;
  std::vector<double> mtus;
  for (const Link& link : links) {
    if (link.problem) continue;
    speeds.push_back(std::min(link.sent_bytes_per_s, link.received_bytes_per_s));
    latencies.push_back(link.latency_us);
    mtus.push_back(link.mtu);
  }
  // One bad host of three has two of their three links: what is usual is what the better ones have.
  const double usual_speed = quantile(speeds, 0.75), usual_latency = quantile(latencies, 0.25);
  const double usual_mtu = quantile(mtus, 1);
  const auto find = [&](Severity severity, const Link& link, const std::string& what, std::string remedy) {
    findings.push_back({"links", severity, link_name(link, hosts) + ": " + what, std::move(remedy)});
  };
  for (const Link& link : links) {
    if (link.problem) {
      find(Severity::kFailure, link, *link.problem,
           "open all ports between the hosts of a job, or name the network that they share: "
           "LOCKSTEP_SOCKET_IFNAME=eth0");
      continue;
    }
    const double speed = std::min(link.sent_bytes_per_s, link.received_bytes_per_s);
    const double fastest = std::max(link.sent_bytes_per_s, link.received_bytes_per_s);
    const double interface = static_cast<double>(link.interface_mbit_s) * 1e6 / 8;
    const std::string figure = fmt::format("{:.2f} Gbit/s", speed / kGbit);
    if (speed < 0.5 * usual_speed)
      find(Severity::kWarning, link, fmt::format("{}, where links have {:.2f} Gbit/s", figure, usual_speed / kGbit),
           "look at cables, switch ports and other traffic; the slowest link sets the pace of all");
    else if (speed < 0.5 * fastest)
      find(Severity::kWarning, link, fmt::format("{} one way, {:.2f} the other way", figure, fastest / kGbit),
           "look at cables, duplex and traffic shaping");
    else if (interface > 0 && speed < 0.5 * interface)
      find(Severity::kWarning, link, fmt::format("{} over interfaces of {:.0f} Gbit/s", figure, interface / kGbit),
           "look at traffic shaping, a virtual machine's limits, and the MTU");
    if (link.latency_us > 3 * usual_latency && link.latency_us > usual_latency + 100)
      find(Severity::kWarning, link, fmt::format("{:.0f} µs, where links have {:.0f}", link.latency_us, usual_latency),
           "hosts far from the others belong to another job");
    if (link.retransmitted > 0.001)
      find(Severity::kWarning, link, fmt::format("{:.1f} % of the segments were sent again", 100 * link.retransmitted),
           "look at cables and at full queues of switches");
    if (link.mtu > 0 && link.mtu < usual_mtu)
      find(Severity::kWarning, link, fmt::format("an MTU of {}, where links have {:.0f}", link.mtu, usual_mtu),
           "give the interfaces of all hosts the same MTU");
  }
  if (findings.empty() && !links.empty())
    findings.push_back({"links", Severity::kOk,
                        fmt::format("{:.2f} Gbit/s and {:.0f} µs between hosts", usual_speed / kGbit, usual_latency)});
  return findings;
}

std::string matrix_of(std::span<const Link> links, std::span<const std::string> hosts) {
  std::string text = fmt::format("{:>16}", "");
  for (const auto& host : hosts) text += fmt::format(" {:>10}", cut_columns(host, 10));
  text += "\n";
  const auto cell = [&](std::size_t row, std::size_t column) -> std::string {
    if (row == column) return "·";
    const auto low = static_cast<int>(std::min(row, column)), high = static_cast<int>(std::max(row, column));
    for (const Link& link : links) {
      if (link.from != low || link.to != high) continue;
      if (link.problem) return "none";
      if (row > column) return fmt::format("{:.0f} µs", link.latency_us);
      return fmt::format("{:.2f} Gb/s", std::min(link.sent_bytes_per_s, link.received_bytes_per_s) / kGbit);
    }
    return "";
  };
  for (std::size_t row = 0; row < hosts.size(); ++row) {
    text += fmt::format("{:>16}", cut_columns(hosts[row], 16));
    for (std::size_t column = 0; column < hosts.size(); ++column) text += fmt::format(" {:>10}", cell(row, column));
    text += "\n";
  }
  return text;
}

}  // namespace lockstep::doctor
