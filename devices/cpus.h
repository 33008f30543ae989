// The processors that this process may run on, and what is close to a device.
#pragma once

#include <bitset>
#include <filesystem>
#include <string>
#include <string_view>

namespace lockstep::devices {

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

/// The NUMA node of a device. Empty where all processors are equally near, or the kernel does not say.
struct Locality {
  int node = -1;  // NUMA node
  CpuMask cpus;   // that node's processors
};

/// What the kernel says of the PCI device at `bus_id` ("0000:1b:00.0"); nothing for an empty one. `sysfs` is /sys, or
/// what stands in for it.
Locality locality_of(const std::string& bus_id, const std::filesystem::path& sysfs = "/sys");

/// Pages that this thread, and those it will start, touch for the first time come from `node` while it has some left.
/// Where the kernel refuses (containers do), all stays as it is, and a debug line says so.
void prefer_memory_of(int node);

}  // namespace lockstep::devices
