// What a rank knows of GPUs before it takes one, as it sends it to the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "devices/machine.h"
#include "lockstep/base/device.h"
#include "lockstep/base/env.h"

namespace lockstep::session {

/// A GPU, or a MIG device of one, that CUDA shows to a rank.
struct VisibleGpu {
  std::string id;      // the same for all who see this GPU, and for no other: its UUID where NVML reports it
  std::string bus_id;  // "0000:1b:00.0"; empty where neither CUDA nor NVML reports it
  std::string name;    // for people; may be empty
  std::optional<std::int64_t> free_bytes;
  bool prohibited = false;  // its compute mode takes no process
  bool exclusive = false;   // its compute mode takes one at a time
  friend bool operator==(const VisibleGpu&, const VisibleGpu&) = default;
};

/// In lower case, the domain with four digits if it fits: CUDA, NVML and /sys do not all write it alike.
std::string plain_bus_id(std::string id);

/// "GPU 1 (NVIDIA H100 80GB HBM3, 0000:2b:00.0)".
std::string to_string(const VisibleGpu& gpu, int index);

struct VisibleGpus {
  std::vector<VisibleGpu> gpus;   // a GPU's place here is its index for CUDA
  std::string problem, remedy;    // why CUDA shows none; empty where it does
  std::string memory_problem;     // why nobody knows how much of their memory is free; empty where that is known
  bool machine_has_gpus = false;  // that this process might use, were it not for `problem`
  friend bool operator==(const VisibleGpus&, const VisibleGpus&) = default;
};

/// CUDA says which GPUs there are and in which order, and NVML what they are: found there by their place on the bus.
/// `machine` names the machine where they have no other name. Pure.
VisibleGpus list_visible_gpus(const CudaProbe& cuda, const devices::Gpus& nvml, const EnvLookup& lookup,
                              const std::string& machine);

/// One rank: where it is, what it asks for (--device, --share-devices, --parallel dp) and sees.
struct RankView {
  std::string machine;  // the same for all processes under one kernel, in containers too
  std::string host;     // for people
  int local_rank = 0;   // orders the ranks of a machine
  std::string device = "auto";
  bool share_devices = false;
  bool all_devices = false;  // it computes on all that it asks for
  VisibleGpus visible;
  friend bool operator==(const RankView&, const RankView&) = default;
};

/// A view as text, and back.
std::string encode(const RankView& view);
RankView decode_view(const std::string& text);

/// This machine, for RankView::machine.
std::string machine_id();

}  // namespace lockstep::session
