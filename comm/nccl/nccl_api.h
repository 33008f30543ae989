// NCCL's functions, in a library that is opened when the first group needs it.
#pragma once

#include <nccl.h>

#include <string>

#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// The functions of NCCL that are used. Tests put others in their place.
struct NcclApi {
  decltype(ncclGetVersion)* get_version = nullptr;
  decltype(ncclGetErrorString)* get_error_string = nullptr;
  decltype(ncclGetLastError)* get_last_error = nullptr;
  decltype(ncclGetUniqueId)* get_unique_id = nullptr;
  decltype(ncclCommInitRankConfig)* comm_init_rank_config = nullptr;
  decltype(ncclCommGetAsyncError)* comm_get_async_error = nullptr;
  decltype(ncclCommFinalize)* comm_finalize = nullptr;
  decltype(ncclCommDestroy)* comm_destroy = nullptr;
  decltype(ncclCommAbort)* comm_abort = nullptr;
  decltype(ncclMemAlloc)* mem_alloc = nullptr;
  decltype(ncclMemFree)* mem_free = nullptr;
  decltype(ncclCommRegister)* comm_register = nullptr;
  decltype(ncclCommDeregister)* comm_deregister = nullptr;
  decltype(ncclAllReduce)* all_reduce = nullptr;
  decltype(ncclReduceScatter)* reduce_scatter = nullptr;
  decltype(ncclAllGather)* all_gather = nullptr;
  decltype(ncclBroadcast)* broadcast = nullptr;
  decltype(ncclReduce)* reduce = nullptr;
  decltype(ncclSend)* send = nullptr;
  decltype(ncclRecv)* recv = nullptr;
  decltype(ncclGroupStart)* group_start = nullptr;
  decltype(ncclGroupEnd)* group_end = nullptr;
};

/// The machine's NCCL, which stays open until the process ends. Throws CudaError if there is none, and NcclError if it
/// is too old.
const NcclApi& load_nccl();

/// Throws NcclError where `api` is older than 2.19, which brought memory that a communicator can register.
void check_nccl_version(const NcclApi& api);

/// "2.28.9".
std::string nccl_version_text(const NcclApi& api);

/// NCCL's words for `result`, and its last ones before it.
std::string nccl_error_text(const NcclApi& api, ncclComm_t comm, ncclResult_t result);

/// Throws NcclError("`doing` failed: …" → what is to be looked at).
[[noreturn]] void throw_nccl_error(const NcclApi& api, ncclComm_t comm, ncclResult_t result, const std::string& doing);

ncclDataType_t nccl_type_of(DType dtype);
ncclRedOp_t nccl_reduction_of(ReduceOp op);

/// Gives `op` to NCCL, in place but for an Op::part. Regions without elements are given nothing. A reduce_scatter or an
/// allgather whose slices differ in size is one reduction or broadcast per slice, all of them in one group. Returns
/// NCCL's result: ncclInProgress where it continues in the background. `scratch` is 4 bytes of the GPU for barriers.
ncclResult_t give_to_nccl(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op, void* scratch,
                          cudaStream_t stream);

}  // namespace lockstep::comm
