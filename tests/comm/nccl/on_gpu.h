// NCCL groups of test processes that may be more than there are GPUs.
#pragma once

#include <memory>

#include "base/cuda/runtime.h"
#include "comm/nccl/nccl_group.h"

namespace lockstep::comm {

/// The stream that the group's operations come after; lives as long as the process.
const CudaStream& producer_on_gpu();

/// A group over `control`, each rank on the GPU of its number; where there are fewer, several are on one.
std::unique_ptr<DeviceGroup> make_group_on_gpu(ProcessGroup& control, Clock::duration timeout);

}  // namespace lockstep::comm
