#include "comm/nccl/partials.h"

#include <algorithm>
#include <vector>

#include "comm/nccl/kernels.h"

namespace lockstep::comm {

ncclResult_t exchange_partials(const NcclApi& api, ncclComm_t comm, int rank, int size, const Op& op,
                               std::byte* received, cudaStream_t stream) {
  const std::size_t element = size_of(op.dtype);
  const ncclDataType_t type = nccl_type_of(op.dtype);
  const Slice own = slice_of(op.count, element, rank, size);
  ncclResult_t result = api.group_start();
  if (result != ncclSuccess) return result;
  const auto goes_on = [&] { return result == ncclSuccess || result == ncclInProgress; };
  for (int peer = 0; peer < size && goes_on(); ++peer) {
    if (peer == rank) continue;
    const Slice theirs = slice_of(op.count, element, peer, size);
    for (std::size_t p = 0; theirs.count > 0 && p < op.along->partials_of(rank).size() && goes_on(); ++p)
      result =
          api.send(op.data + p * op.partial_stride + theirs.begin * element, theirs.count, type, peer, comm, stream);
    for (std::size_t p = 0; own.count > 0 && p < op.along->partials_of(peer).size() && goes_on(); ++p) {
      result = api.recv(received, own.count, type, peer, comm, stream);
      received += own.count * element;
    }
  }
  const ncclResult_t ended = api.group_end();
  return goes_on() ? ended : result;
}

void add_partials(const Op& op, int rank, int size, const std::byte* received, StreamView stream) {
  const std::size_t element = size_of(op.dtype);
  const Slice own = slice_of(op.count, element, rank, size);
  std::vector<const std::byte*> first(static_cast<std::size_t>(size));  // of a rank's partial sums
  for (int r = 0; r < size; ++r) {
    first[static_cast<std::size_t>(r)] = r == rank ? op.data + own.begin * element : received;
    if (r != rank) received += op.along->partials_of(r).size() * own.count * element;
  }
  TreeSources sources{};
  for (const int r : op.along->order()) {
    const auto partials = op.along->partials_of(r);
    const std::size_t stride = r == rank ? op.partial_stride : own.count * element;
    for (std::size_t p = 0; p < partials.size(); ++p)
      sources.at[sources.count++] = first[static_cast<std::size_t>(r)] + p * stride;
  }
  std::ranges::copy(TreeProgram(*op.along).additions, sources.additions);
  launch_sum_along_tree(sources, op.dtype, op.data + own.begin * element, own.count, stream);
}

}  // namespace lockstep::comm
