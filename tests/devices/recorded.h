// NVML as a recording answers it, in the place of a driver.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "devices/machine.h"
#include "devices/nvml.h"

namespace lockstep::devices::testing {

/// All files under recordings/, without ".json".
std::set<std::string> recordings();

/// The functions of the stand-in library without those in `missing`, answering from `recording`. One at a time.
Symbols recorded_symbols(const std::string& recording, std::set<std::string> missing = {});

/// What the recording's machine has, read in full; no card has a NUMA node unless `sysfs` says so.
Gpus recorded_gpus(const std::string& recording, const std::set<std::string>& missing = {},
                   const std::filesystem::path& sysfs = "/nowhere");

/// A machine with these GPUs and always the same CPU.
Machine machine_with(Gpus gpus);

/// How many users the stand-in library has now.
int library_users();

}  // namespace lockstep::devices::testing
