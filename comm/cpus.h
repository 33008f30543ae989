// The processors that this process may run on.
#pragma once

#include <bitset>
#include <string>
#include <string_view>

namespace lockstep::comm {

/// A set of the operating system's processor numbers (hardware threads). Trivially copyable, so that ranks can send
/// it as bytes.
using CpuMask = std::bitset<4096>;

/// "0-3,8", and back: what is no such list is an empty set.
std::string ranges_text(const CpuMask& cpus);
CpuMask parse_ranges(std::string_view text);

/// The calling thread's affinity; all processors if the system does not say.
CpuMask allowed_cpus();

/// Sets the calling thread's affinity, which threads that it starts inherit. Throws DeviceError.
void set_allowed_cpus(const CpuMask& cpus);

/// Warns, once in a process, that so many processes share fewer processors. `lockstep launch` has said so already where
/// it has started them.
void warn_of_crowd(int processes, const CpuMask& cpus);

}  // namespace lockstep::comm
