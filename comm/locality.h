// Where on its host a device is.
#pragma once

#include <filesystem>
#include <string>

#include "comm/cpus.h"

namespace lockstep::comm {

/// What is close to a device. Nothing, where it is as far from all processors, or nobody tells.
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

}  // namespace lockstep::comm
