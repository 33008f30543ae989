#include "comm/nccl/nccl_api.h"

#include "base/error.h"
#include "base/text.h"
#include "comm/nccl/nccl_group.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 19, 1);

int version_of(const NcclApi& api) {
  int version = 0;
  return api.get_version(&version) == ncclSuccess ? version : 0;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

const char* remedy_for(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError: return "look at the logs of the other ranks: one of them failed first, or the network did";
    case ncclSystemError:
      return "look at the network between the hosts (NCCL_SOCKET_IFNAME) and at /dev/shm; NCCL_DEBUG=WARN says more";
    case ncclUnhandledCudaError: return "look at nvidia-smi and the kernel's log (dmesg); NCCL_DEBUG=WARN says more";
    case ncclInvalidUsage: return "start every rank alike, on a GPU that NCCL can use; NCCL_DEBUG=WARN says more";
    default: return "run it with NCCL_DEBUG=WARN, which says more";
  }
}

bool slices_are_equal(std::size_t count, std::size_t element_bytes, int size) {
  const auto n = static_cast<std::size_t>(size);
  if (count % n != 0) return false;
  for (int rank = 0; rank < size; ++rank)
    if (slice_of(count, element_bytes, rank, size).count != count / n) return false;
  return true;
}

/// Calls `each` for all slices that have elements, in one group.
template <class Each>
ncclResult_t for_each_slice(const NcclApi& api, const Op& op, int size, Each&& each) {
  const std::size_t element = size_of(op.dtype);
  ncclResult_t result = api.group_start();
  if (result != ncclSuccess) return result;
  for (int root = 0; root < size; ++root) {
    const Slice slice = slice_of(op.count, element, root, size);
    if (slice.count == 0) continue;
    result = each(op.data + slice.begin * element, slice.count, root);
    if (result != ncclSuccess && result != ncclInProgress) break;
  }
  // A group that was begun is ended, whatever has happened in it.
  const ncclResult_t ended = api.group_end();
  return result != ncclSuccess && result != ncclInProgress ? result : ended;
}

}  // namespace

ncclRedOp_t nccl_reduction_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return ncclSum;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
    case ReduceOp::kProd: return ncclProd;
  }
  LOCKSTEP_ASSERT(false, "an unknown reduction");
  return ncclSum;
}

ncclDataType_t nccl_type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return ncclFloat32;
    case DType::kF64: return ncclFloat64;
    case DType::kBF16: return ncclBfloat16;
    case DType::kI32: return ncclInt32;
    case DType::kI64: return ncclInt64;
    case DType::kU8: return ncclUint8;
    case DType::kF16: return ncclFloat16;
  }
  LOCKSTEP_ASSERT(false, "an unknown element type");
  return ncclUint8;
}

void check_nccl_version(const NcclApi& api) {
  const int version = version_of(api);
  if (version < kOldest)
    throw NcclError(fmt::format("NCCL {} is too old", version_text(version)),
                    fmt::format("install NCCL {} or newer", version_text(kOldest)));
}

std::string nccl_version_text(const NcclApi& api) { return version_text(version_of(api)); }

std::string nccl_library_version() {
  try {
    return nccl_version_text(load_nccl());
  } catch (const Error& error) {
    return error.what();
  }
}

std::string nccl_error_text(const NcclApi& api, ncclComm_t comm, ncclResult_t result) {
  const char* const last = api.get_last_error(comm);
  const std::string_view words = trim(last == nullptr ? "" : last);
  return words.empty() ? std::string(api.get_error_string(result))
                       : fmt::format("{}: {}", api.get_error_string(result), words);
}

void throw_nccl_error(const NcclApi& api, ncclComm_t comm, ncclResult_t result, const std::string& doing) {
  throw NcclError(fmt::format("{} failed: {}", doing, nccl_error_text(api, comm, result)), remedy_for(result));
}

ncclResult_t give_to_nccl(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op, void* scratch,
                          cudaStream_t stream) {
  if (op.kind == OpKind::kBarrier) return api.all_reduce(scratch, scratch, 1, ncclInt32, ncclSum, comm, stream);
  const std::size_t count = op.count;
  if (count == 0) return ncclSuccess;
  const std::size_t element = size_of(op.dtype);
  const ncclDataType_t type = nccl_type_of(op.dtype);
  const ncclRedOp_t reduction = nccl_reduction_of(op.reduce);
  const Slice own = slice_of(count, element, rank, size);
  std::byte* const own_data = op.data + own.begin * element;
  const std::size_t part_count = count / static_cast<std::size_t>(size);
  switch (op.kind) {
    case OpKind::kAllReduce: return api.all_reduce(op.data, op.data, count, type, reduction, comm, stream);
    case OpKind::kReduce: return api.reduce(op.data, op.data, count, type, reduction, op.root, comm, stream);
    case OpKind::kBroadcast: return api.broadcast(op.data, op.data, count, type, op.root, comm, stream);
    case OpKind::kReduceScatter:
      if (op.part != nullptr) return api.reduce_scatter(op.data, op.part, part_count, type, reduction, comm, stream);
      if (slices_are_equal(count, element, size))
        return api.reduce_scatter(op.data, own_data, own.count, type, reduction, comm, stream);
      return for_each_slice(api, op, size, [&](std::byte* data, std::size_t n, int root) {
        return api.reduce(data, data, n, type, reduction, root, comm, stream);
      });
    case OpKind::kAllGather:
      if (op.part != nullptr) return api.all_gather(op.part, op.data, part_count, type, comm, stream);
      if (slices_are_equal(count, element, size))
        return api.all_gather(own_data, op.data, own.count, type, comm, stream);
      return for_each_slice(api, op, size, [&](std::byte* data, std::size_t n, int root) {
        return api.broadcast(data, data, n, type, root, comm, stream);
      });
    case OpKind::kBarrier: break;
  }
  LOCKSTEP_ASSERT(false, "an unknown operation");
  return ncclInternalError;
}

}  // namespace lockstep::comm
