// The kernel under this process, as it describes itself and the process: its start, namespaces, control groups.
#pragma once

#include <cstdint>
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

/// What this process has resident, in bytes: the most so far, and now (which costs a few microseconds; 0 where /proc
/// does not say).
std::int64_t peak_resident_bytes();
std::int64_t resident_bytes();
/// Seconds that this process's threads have run, in the program and in the kernel for it.
double cpu_seconds();

}  // namespace lockstep
