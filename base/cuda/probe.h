// CUDA as this process has it (lockstep/base/cuda_probe.h), and how messages name it.
#pragma once

#include <string>

#include "lockstep/base/cuda_probe.h"

namespace lockstep {

/// The PCI address of this thread's current GPU, as in CudaProbe::bus_ids; empty where CUDA does not report it. Creates
/// no context.
std::string current_cuda_bus_id();

/// "13.0" for 13000.
std::string cuda_version_text(int version);

}  // namespace lockstep
