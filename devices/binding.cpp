#include "devices/binding.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::devices {
namespace {

enum class Policy { kCore, kSocket, kNone };

Policy policy_from(const EnvLookup& lookup) {
  const std::string value = lookup("LOCKSTEP_BIND").value_or("core");
  if (value == "core") return Policy::kCore;
  if (value == "socket") return Policy::kSocket;
  if (value == "none") return Policy::kNone;
  const std::array<std::string, 3> known = {"core", "socket", "none"};
  const auto meant = nearest(value, known);
  throw UsageError(fmt::format("LOCKSTEP_BIND=\"{}\" in the environment is no way to bind", value),
                   meant ? fmt::format("did you mean {}? there are core, socket and none", *meant)
                         : "set it to core, socket or none");
}

CpuMask union_of(const std::vector<Core>& cores) {
  CpuMask all;
  for (const Core& core : cores) all |= core.cpus;
  return all;
}

/// Part `index` of `count` of 0 … size - 1.
std::pair<std::size_t, std::size_t> part_of(std::size_t size, std::size_t index, std::size_t count) {
  const std::size_t each = size / count, larger = size % count;
  const std::size_t begin = index * each + std::min(index, larger);
  return {begin, begin + each + (index < larger ? 1 : 0)};
}

}  // namespace

std::vector<Core> core_share(const std::vector<Core>& cores, int index, int count) {
  LOCKSTEP_ASSERT(!cores.empty() && index >= 0 && index < count, "process {} of {}", index, count);
  const auto i = static_cast<std::size_t>(index);
  const auto n = static_cast<std::size_t>(count);
  if (cores.size() < n) return {cores[i % cores.size()]};
  const auto [begin, end] = part_of(cores.size(), i, n);
  return {cores.begin() + static_cast<std::ptrdiff_t>(begin), cores.begin() + static_cast<std::ptrdiff_t>(end)};
}

std::vector<Core> socket_share(const std::vector<Core>& cores, int index, int count) {
  LOCKSTEP_ASSERT(!cores.empty() && index >= 0 && index < count, "process {} of {}", index, count);
  std::vector<int> sockets;
  for (const Core& core : cores)
    if (sockets.empty() || sockets.back() != core.socket) sockets.push_back(core.socket);
  const auto i = static_cast<std::size_t>(index);
  const auto n = static_cast<std::size_t>(count);
  // Neighbours share a socket when there are more processes than sockets.
  auto [begin, end] = part_of(sockets.size(), i, n);
  if (sockets.size() < n) {
    begin = i * sockets.size() / n;
    end = begin + 1;
  }
  std::vector<Core> share;
  for (const Core& core : cores)
    for (std::size_t s = begin; s < end; ++s)
      if (core.socket == sockets[s]) share.push_back(core);
  return share;
}

std::vector<Core> near_share(const std::vector<Core>& cores, std::span<const CpuMask> near, int index) {
  const auto mine = static_cast<std::size_t>(index);
  LOCKSTEP_ASSERT(index >= 0 && mine < near.size(), "process {} of {}", index, near.size());
  std::vector<Core> close;
  std::ranges::copy_if(cores, std::back_inserter(close),
                       [&](const Core& core) { return (core.cpus & near[mine]).any(); });
  if (close.empty()) return core_share(cores, index, static_cast<int>(near.size()));
  const auto neighbours_before = std::count(near.begin(), near.begin() + index, near[mine]);
  const auto neighbours = std::ranges::count(near, near[mine]);
  return core_share(close, static_cast<int>(neighbours_before), static_cast<int>(neighbours));
}

std::string binding_claim(const EnvLookup& lookup, const Locality& device) {
  policy_from(lookup);
  return fmt::format("{} {}|{}", host_name(), ranges_text(allowed_cpus()), ranges_text(device.cpus));
}

Binding bind_to_share(std::span<const std::string> claims, int index, const EnvLookup& lookup, const Locality& device) {
  const Policy policy = policy_from(lookup);
  const CpuMask allowed = allowed_cpus();
  const std::string& mine = claims[static_cast<std::size_t>(index)];
  const std::string alike = mine.substr(0, mine.rfind('|') + 1);
  // Of the processes with this one's host and affinity: which processors are close to the device of each.
  std::vector<CpuMask> near;
  int place = 0;
  for (std::size_t i = 0; i < claims.size(); ++i) {
    if (!claims[i].starts_with(alike)) continue;
    if (static_cast<int>(i) < index) ++place;
    near.push_back(parse_ranges(std::string_view(claims[i]).substr(alike.size())));
  }
  const auto count = static_cast<int>(near.size());

  const std::vector<Core> cores = discover_cores(allowed);
  const bool close = std::ranges::any_of(cores, [&](const Core& core) { return (core.cpus & device.cpus).any(); });
  if (device.cpus.any() && !close)
    log_debug("none of the processors that this rank may use ({}) is close to its GPU ({}): it takes its share of all",
              ranges_text(allowed), ranges_text(device.cpus));
  // By sockets, those who share one divide its cores as far as the number of threads is concerned.
  const std::vector<Core> threads_on = near_share(cores, near, place);
  Binding binding;
  binding.cores = static_cast<int>(threads_on.size());
  binding.spare_core = binding.cores > 1;
  binding.oversubscribed = cores.size() < static_cast<std::size_t>(count);
  CpuMask chosen = allowed;
  if (policy == Policy::kCore) chosen = union_of(threads_on);
  if (policy == Policy::kSocket)
    chosen = close ? union_of(cores) & device.cpus : union_of(socket_share(cores, place, count));
  if (chosen != allowed) set_allowed_cpus(chosen);
  if (policy != Policy::kNone && close) prefer_memory_of(device.node);
  binding.text =
      fmt::format("{} core{} (processors {}), {}", binding.cores, binding.cores == 1 ? "" : "s", ranges_text(chosen),
                  policy == Policy::kNone ? "not bound"
                  : chosen == allowed     ? "as started"
                  : close                 ? "bound, close to the GPU"
                                          : "bound");
  return binding;
}

int expected_cores(int processes) {
  return std::max(1, static_cast<int>(discover_cores(allowed_cpus()).size()) / processes);
}

}  // namespace lockstep::devices
