// How much memory this process uses, and how much more it may.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/memory_source.h"

namespace lockstep {

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
