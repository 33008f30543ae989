// MPI's own collectives.
#include <mpi.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "base/error.h"
#include "bench/rivals/rivals.h"
#include "comm/mpi/session.h"

namespace lockstep::bench {
namespace {

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return MPI_FLOAT;
    case DType::kF64: return MPI_DOUBLE;
    case DType::kI32: return MPI_INT32_T;
    case DType::kI64: return MPI_INT64_T;
    case DType::kU8: return MPI_UINT8_T;
    case DType::kBF16:
    case DType::kF16: return MPI_UINT16_T;  // to be moved, not to be summed
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op op_of(comm::ReduceOp op) {
  switch (op) {
    case comm::ReduceOp::kSum: return MPI_SUM;
    case comm::ReduceOp::kMin: return MPI_MIN;
    case comm::ReduceOp::kMax: return MPI_MAX;
    case comm::ReduceOp::kProd: return MPI_PROD;
  }
  return MPI_OP_NULL;
}

class MpiRival final : public Rival {
 public:
  MpiRival(const comm::World& world, Clock::duration timeout)
      : started_(start()), session_(world, Deadline::after(timeout)) {}

  bool has(const CollectiveOptions& options) const override {
    return !family_of(options.collective).reduces || (options.dtype != DType::kBF16 && options.dtype != DType::kF16);
  }

  void run(const CollectiveOptions& options, std::byte* values, std::byte* other, std::size_t bytes) override {
    const MPI_Comm comm = session_.data();
    const MPI_Datatype type = type_of(options.dtype);
    const MPI_Op op = op_of(options.op);
    const auto ranks = static_cast<std::size_t>(session_.size());
    const std::size_t all = bytes / size_of(options.dtype);
    LOCKSTEP_ASSERT(all <= INT_MAX, "{} elements for MPI", all);
    const int count = static_cast<int>(all), part = static_cast<int>(all / ranks);
    const int root = options.root, rank = session_.rank();
    switch (options.collective) {
      case Collective::kAllReduce: MPI_Allreduce(MPI_IN_PLACE, values, count, type, op, comm); return;
      case Collective::kReduceScatter: MPI_Reduce_scatter_block(values, other, part, type, op, comm); return;
      case Collective::kAllGather: MPI_Allgather(other, part, type, values, part, type, comm); return;
      case Collective::kBroadcast: MPI_Bcast(values, count, type, root, comm); return;
      case Collective::kReduce:
        MPI_Reduce(rank == root ? MPI_IN_PLACE : values, values, count, type, op, root, comm);
        return;
      case Collective::kAllToAll: MPI_Alltoall(values, part, type, other, part, type, comm); return;
      case Collective::kSendRecv: return send_and_receive(options.pattern, values, other, count, type);
      case Collective::kBarrier: MPI_Barrier(comm); return;
    }
  }

  void settle() override { MPI_Barrier(session_.data()); }

  void shutdown() override {
    session_.finalize();
    if (started_) MPI_Finalize();
  }

 private:
  /// With MPI's own settings: a group that starts it changes some (comm/mpi/session.cpp). Whether it was not running.
  static bool start() {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized == 0) MPI_Init(nullptr, nullptr);
    return initialized == 0;
  }

  void send_and_receive(Pattern pattern, std::byte* values, std::byte* other, int count, MPI_Datatype type) {
    const MPI_Comm comm = session_.pairs();
    const auto partners = partners_of(pattern, session_.rank(), session_.size());
    if (!partners) return;
    const auto [to, from, first] = *partners;
    if (pattern == Pattern::kRing) {
      MPI_Sendrecv(values, count, type, to, 0, other, count, type, from, 0, comm, MPI_STATUS_IGNORE);
      return;
    }
    if (pattern == Pattern::kLatency) {
      if (first) MPI_Send(values, count, type, to, 0, comm);
      MPI_Recv(other, count, type, from, 0, comm, MPI_STATUS_IGNORE);
      if (!first) MPI_Send(values, count, type, to, 0, comm);
      return;
    }
    int element = 0;
    MPI_Type_size(type, &element);
    const bool both = pattern == Pattern::kBidirectional;
    requests_.clear();
    for (int i = window_of(static_cast<std::size_t>(count) * static_cast<std::size_t>(element)); i > 0; --i) {
      if (both || !first) MPI_Irecv(other, count, type, from, 0, comm, &requests_.emplace_back());
      if (both || first) MPI_Isend(values, count, type, to, 0, comm, &requests_.emplace_back());
    }
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    int done = 0;
    if (first)
      MPI_Recv(&done, 1, MPI_INT, from, 1, comm, MPI_STATUS_IGNORE);
    else
      MPI_Send(&done, 1, MPI_INT, to, 1, comm);
  }

  bool started_;
  comm::Session session_;
  std::vector<MPI_Request> requests_;
};

}  // namespace

std::unique_ptr<Rival> make_mpi_rival(const comm::World& world, comm::ProcessGroup& group, std::string& missing) {
  if (!world.mpi_joins) {
    missing = "MPI does not know these ranks: start them with mpirun, or with lockstep launch --mpi";
    return nullptr;
  }
  return std::make_unique<MpiRival>(world, group.timeout());
}

}  // namespace lockstep::bench
