// How much of its machine this process may use: processors' time and memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// Processors' worth of time that all processes of a group may take together.
struct CpuQuota {
  double cpus = 0;
  std::string name;  // "the control group /job (cpu.max)"
};

/// The smallest quota of the groups that this process is in; nothing where none has any. `root`: where /proc and the
/// groups' file systems are found, for tests.
std::optional<CpuQuota> cpu_quota(const std::string& root = "");

/// How many threads `quota` keeps busy, at least one, and at most `cores`.
int threads_within(const std::optional<CpuQuota>& quota, int cores);

/// What some processes, this one among them, may still take together before the kernel ends one of them.
struct MemoryBound {
  std::string id;    // the same for processes that share it, on whatever host
  std::string name;  // for people: "the machine", "the control group /job (memory.max 2.0 GiB)"
  std::uint64_t free_bytes = 0;
};

/// The machine's available memory, swap included, and what the limits of this process' control groups leave: versions 1
/// and 2, all ancestors included. Files in the page cache count as free. Empty where the kernel does not say. `root` as
/// above.
std::vector<MemoryBound> memory_bounds(const std::string& root = "");

/// How many processes of this host the kernel has ended for lack of memory since it was booted, those of control groups
/// included; nothing where the kernel does not say.
std::optional<std::uint64_t> memory_kills(const std::string& root = "");

}  // namespace lockstep
