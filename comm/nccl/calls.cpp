#include "comm/nccl/calls.h"

#include "base/error.h"
#include "comm/op.h"

namespace lockstep::comm {
namespace {

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return ncclFloat32;
    case DType::kF64: return ncclFloat64;
    case DType::kBF16: return ncclBfloat16;
    case DType::kI32: return ncclInt32;
    case DType::kI64: return ncclInt64;
    case DType::kU8: return ncclUint8;
  }
  LOCKSTEP_ASSERT(false, "an unknown element type");
  return ncclUint8;
}

ncclRedOp_t reduction_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return ncclSum;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
  }
  LOCKSTEP_ASSERT(false, "an unknown reduction");
  return ncclSum;
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

ncclResult_t give_to_nccl(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op, void* scratch,
                          cudaStream_t stream) {
  if (op.kind == OpKind::kBarrier) return api.all_reduce(scratch, scratch, 1, ncclInt32, ncclSum, comm, stream);
  const std::size_t count = op.count;
  if (count == 0) return ncclSuccess;
  const std::size_t element = size_of(op.dtype);
  const ncclDataType_t type = type_of(op.dtype);
  const ncclRedOp_t reduction = reduction_of(op.reduce);
  const Slice own = slice_of(count, element, rank, size);
  std::byte* const own_data = op.data + own.begin * element;
  switch (op.kind) {
    case OpKind::kAllReduce: return api.all_reduce(op.data, op.data, count, type, reduction, comm, stream);
    case OpKind::kBroadcast: return api.broadcast(op.data, op.data, count, type, op.root, comm, stream);
    case OpKind::kReduceScatter:
      if (slices_are_equal(count, element, size))
        return api.reduce_scatter(op.data, own_data, own.count, type, reduction, comm, stream);
      return for_each_slice(api, op, size, [&](std::byte* data, std::size_t n, int root) {
        return api.reduce(data, data, n, type, reduction, root, comm, stream);
      });
    case OpKind::kAllGather:
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
