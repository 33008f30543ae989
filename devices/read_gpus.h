// Reads the machine's GPUs from NVML.
#pragma once

#include <filesystem>

#include "devices/machine.h"
#include "devices/nvml.h"

namespace lockstep::devices {

enum class Detail {
  kChoice,  // what choosing among them takes: names, ids, memory, compute mode, MIG devices
  kAll,
};

/// Never throws because of cards or drivers: unknown values are absent, and a card that fails has a `problem`. `sysfs`
/// is /sys, or what stands in for it.
Gpus read_gpus(const Nvml& nvml, Detail detail, const std::filesystem::path& sysfs = "/sys");

/// The same, with the library of this machine, which is unloaded again.
Gpus read_gpus(Detail detail);

}  // namespace lockstep::devices
