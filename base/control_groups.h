// What the kernel's control groups, versions 1 and 2, allow this process.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lockstep {

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

}  // namespace lockstep
