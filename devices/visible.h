// Which of the machine's GPUs a process may use, and which of those to take. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "devices/machine.h"
#include "lockstep/base/env.h"

namespace lockstep::devices {

/// A device for one rank: a GPU, or a MIG device of one.
struct VisibleDevice {
  int gpu = 0;             // Gpu::index
  std::optional<int> mig;  // MigDevice::index
  std::string id;          // names it, and it alone, in CUDA_VISIBLE_DEVICES: a UUID, or an index where there is none
  std::optional<std::int64_t> free_bytes;
  bool prohibited = false;  // its compute mode refuses every process
  friend bool operator==(const VisibleDevice&, const VisibleDevice&) = default;
};

/// The devices that CUDA_VISIBLE_DEVICES in `lookup` leaves, in its order: an index list, or UUIDs and MIG ids, which
/// may be shortened as long as they are unambiguous. As in CUDA, all of them where it is unset, none where it is empty
/// or names a device twice, and those before the first one that does not exist. Cards that do not answer are neither
/// there nor counted. Indices are Gpu::index's order, which CUDA has with CUDA_DEVICE_ORDER=PCI_BUS_ID.
///
/// A GPU that is split into MIG devices stands for all of them. CUDA shows a process one MIG device at most: whoever
/// gives them to ranks sets CUDA_VISIBLE_DEVICES to one `id` for each.
std::vector<VisibleDevice> visible_gpus(const Gpus& gpus, const EnvLookup& lookup);

/// The positions in `visible` of the `count` devices with most free memory, the freest first, at equal memory the
/// earlier one. Devices that do not report their memory come last. Prohibited ones are left out, so there may be fewer.
std::vector<int> most_free(std::span<const VisibleDevice> visible, int count);

/// Those that have at least nine tenths of the free memory of the one with most, in the order of most_free(): of equal
/// cards all that nobody else uses. Never one that is prohibited; where no device reports its memory, none.
std::vector<int> emptiest(std::span<const VisibleDevice> visible);

}  // namespace lockstep::devices
