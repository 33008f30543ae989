// Allreduces along a tree over NCCL: what is sent, and what is made of it.
#pragma once

#include <cstddef>

#include "comm/nccl/nccl_api.h"
#include "lockstep/base/device.h"
#include "lockstep/comm/reduction_tree.h"

namespace lockstep::comm {

/// The first half of an allreduce along a tree: sends each rank its slice of this rank's partial sums, and receives
/// those of the others for its own slice into `received`, rank after rank without its own.
ncclResult_t exchange_partials(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op,
                               std::byte* received, cudaStream_t stream);

/// The sum of this rank's slice, of its own partial sums and those that exchange_partials() has received, into the
/// region.
void add_partials(const Op& op, int rank, int size, const std::byte* received, StreamView stream);

}  // namespace lockstep::comm
