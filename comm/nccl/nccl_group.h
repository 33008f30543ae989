// Ranks with a GPU each, joined by NCCL.
#pragma once

#include <memory>
#include <string>

#include "lockstep/comm/device_group.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

struct NcclApi;

/// Collective over `control`, the CPU's group of the same ranks, which must outlive the group: through it the ranks
/// agree that all of them have the same NCCL, exchange objects, and find out who is missing. Ranks that share a GPU run
/// on it alternately and reach each other over sockets, which is for trying things out: NCCL_HOSTID is set for them.
/// `api`: another than the machine's, for tests; must outlive the group.
///
/// Throws DeviceError if this build or this machine cannot use GPUs, CudaError or NcclError if NCCL is missing or
/// fails, OutOfStepError if ranks have different versions, TimeoutError with the missing ranks, and PeerError if
/// another rank has already reported the error.
///
/// Reductions are NCCL's: every rank has the same bits, in an order of its own choice (Note [Rank order]); what min and
/// max make of NaN is its choice too.
std::unique_ptr<DeviceGroup> make_nccl_group(ProcessGroup& control, const DeviceGroupOptions& options,
                                             const NcclApi* api = nullptr);

/// "2.28.9", or why this machine has none. Opens the library.
std::string nccl_library_version();

}  // namespace lockstep::comm
