// Which kernel a process runs on, and what of it the process sees.
#pragma once

#include <string>

namespace lockstep {

/// What distinguishes one start of one machine's kernel from all others. Empty where /proc does not say. `root` stands
/// for "/" in tests.
std::string boot_id(const std::string& root = {});

/// What the namespace of `kind` ("pid", "net", "time", "cgroup") of this process is called: the same for processes
/// that share it. Empty where /proc does not say.
std::string namespace_id(const char* kind, const std::string& root = {});

}  // namespace lockstep
