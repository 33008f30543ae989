// Operations as NCCL knows them.
#pragma once

#include <nccl.h>

#include "comm/nccl/nccl_api.h"
#include "comm/op.h"

namespace lockstep::comm {

/// Gives `op` to NCCL, in place. Regions without elements are given nothing. A reduce_scatter or an allgather whose
/// slices differ in size is one reduction or broadcast a slice, all of them in one group. Returns what NCCL says:
/// ncclInProgress where it goes on in the background. `scratch` is 4 bytes of the GPU for barriers.
ncclResult_t give_to_nccl(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op, void* scratch,
                          cudaStream_t stream);

}  // namespace lockstep::comm
