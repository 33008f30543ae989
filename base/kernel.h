// The kernel under this process: which one it is, what of it the process sees, and how much it may use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// What distinguishes one start of one machine's kernel from all others. Empty where /proc does not say. `root` stands
/// for "/" in tests.
std::string boot_id(const std::string& root = {});

/// What the namespace of `kind` ("pid", "net", "time", "cgroup") of this process is called: the same for processes
/// that share it. Empty where /proc does not say.
std::string namespace_id(const char* kind, const std::string& root = {});

/// A group as people call it ("/jobs/one"; "/" is the topmost one that is seen), and where its files are.
struct ControlGroup {
  std::string name, directory;
};

/// The groups that this process is in, its own one first and then all ancestors, of version 2 (`unified`) or of version
/// 1's `controller` ("cpu", "memory"). Empty where the kernel has none. `root`: where /proc and the groups' file
/// systems are found, for tests.
std::vector<ControlGroup> control_groups(const std::string& controller, bool unified, const std::string& root = "");

/// Processors' worth of time that all processes of a group may take together.
struct CpuQuota {
  double cpus = 0;
  std::string name;  // "the control group /job (cpu.max)"
};

/// The smallest quota of the groups that this process is in; nothing where none has any. `root` as above.
std::optional<CpuQuota> cpu_quota(const std::string& root = "");

/// How many threads `quota` keeps busy, at least one, and at most `cores`.
int threads_within(const std::optional<CpuQuota>& quota, int cores);

/// The most bytes that this process has had resident so far.
std::int64_t peak_resident_bytes();

/// What some processes, this one among them, may still take together before the kernel ends one of them.
struct MemoryBound {
  std::string id;    // the same for processes that share it, on whatever host
  std::string name;  // for people: "the machine", "the control group /job (memory.max 2.0 GiB)"
  std::uint64_t free_bytes = 0;
};

/// The machine's available memory, swap included, and what the limits of this process' control groups leave: versions 1
/// and 2, all ancestors included. Files in the page cache count as free. Empty where the kernel does not say. `root`:
/// where /proc and the groups' file systems are found, for tests.
std::vector<MemoryBound> memory_bounds(const std::string& root = "");

/// How many processes of this host the kernel has ended for lack of memory since it was booted, those of control groups
/// included; nothing where the kernel does not say.
std::optional<std::uint64_t> memory_kills(const std::string& root = "");

}  // namespace lockstep
