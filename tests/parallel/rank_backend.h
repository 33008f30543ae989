// The device that group()'s arenas are on: the CPU (cpu_backend.cpp), or a GPU with NCCL, in software
// (soft_gpu_backend.cpp) or not (gpu_backend.cpp).
#pragma once

#include <memory>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::testing {

/// Another one for the same device.
std::unique_ptr<nn::Backend> make_rank_backend();

/// One for the process; it lives as long.
nn::Backend& rank_backend();

}  // namespace lockstep::testing
