#include "base/resource_limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>

#include "base/kernel.h"
#include "base/text.h"

namespace lockstep {
namespace {

/// Of one group; nothing where it sets none.
std::optional<double> quota_of(const std::string& directory, bool unified) {
  double quota = 0, period = 0;
  if (unified) {
    std::ifstream file(directory + "/cpu.max");  // "max 100000" or "200000 100000"
    file >> quota >> period;
  } else {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;  // or above: version 1 has a large number for "none"

std::optional<std::uint64_t> number_of(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The number after `key` in a file of lines "key number …" or "key: number …".
std::optional<std::uint64_t> entry_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto words = words_of(line);
    if (words.size() >= 2 && (words[0] == key || words[0] == key + ":")) return number_of(words[1]);
  }
  return std::nullopt;
}

/// A file of one number; kNoLimit for "max". Nothing where there is no such file.
std::optional<std::uint64_t> limit_of(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return word == "max" ? kNoLimit : number_of(word);
}

std::uint64_t less(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; }

/// What one group's limit `limit` leaves.
std::uint64_t room_under(const std::string& directory, std::uint64_t limit, bool unified, std::uint64_t machine_swap) {
  const std::string stat = directory + "/memory.stat", total = unified ? "" : "total_";
  const std::uint64_t used = limit_of(directory + (unified ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  std::uint64_t cached = 0;
  for (const char* const key : {"inactive_file", "active_file"}) cached += entry_of(stat, total + key).value_or(0);
  std::uint64_t swap = machine_swap;
  if (unified)
    if (const auto most = limit_of(directory + "/memory.swap.max"); most && *most < kNoLimit)
      swap = std::min(swap, less(*most, limit_of(directory + "/memory.swap.current").value_or(0)));
  return less(limit, less(used, cached)) + swap;
}

void add_groups(const std::string& root, const std::string& machine, bool unified, std::uint64_t machine_swap,
                std::vector<MemoryBound>& bounds) {
  const std::vector<const char*> limits = unified ? std::vector<const char*>{"memory.max", "memory.high"}
                                                  : std::vector<const char*>{"memory.limit_in_bytes"};
  for (const ControlGroup& group : control_groups("memory", unified, root)) {
    for (const char* const name : limits) {
      const auto limit = limit_of(fmt::format("{}/{}", group.directory, name));
      if (!limit || *limit >= kNoLimit) continue;
      // A path means the same group to the processes of one such namespace.
      bounds.push_back({.id = fmt::format("{} {} {} {}", machine, namespace_id("cgroup", root), name, group.name),
                        .name = fmt::format("the control group {} ({} {})", group.name, name,
                                            human_bytes(static_cast<double>(*limit))),
                        .free_bytes = room_under(group.directory, *limit, unified, machine_swap)});
    }
  }
}

}  // namespace

std::optional<CpuQuota> cpu_quota(const std::string& root) {
  std::optional<CpuQuota> least;
  for (const bool unified : {true, false})
    for (const ControlGroup& group : control_groups("cpu", unified, root))
      if (const auto cpus = quota_of(group.directory, unified); cpus && (!least || *cpus < least->cpus))
        least = CpuQuota{
            .cpus = *cpus,
            .name = fmt::format("the control group {} ({})", group.name, unified ? "cpu.max" : "cpu.cfs_quota_us")};
  return least;
}

int threads_within(const std::optional<CpuQuota>& quota, int cores) {
  return std::max(1, quota ? static_cast<int>(std::min<double>(cores, std::ceil(quota->cpus))) : cores);
}

std::vector<MemoryBound> memory_bounds(const std::string& root) {
  constexpr std::uint64_t kKib = 1024;
  const std::string meminfo = root + "/proc/meminfo";
  const auto available = entry_of(meminfo, "MemAvailable");
  if (!available) return {};
  const std::uint64_t swap = entry_of(meminfo, "SwapFree").value_or(0) * kKib;
  const std::string machine = boot_id(root);
  std::vector<MemoryBound> bounds = {{.id = machine, .name = "the machine", .free_bytes = *available * kKib + swap}};
  for (const bool unified : {true, false}) add_groups(root, machine, unified, swap, bounds);
  return bounds;
}

std::optional<std::uint64_t> memory_kills(const std::string& root) {
  return entry_of(root + "/proc/vmstat", "oom_kill");
}

}  // namespace lockstep
