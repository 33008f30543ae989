// NCCL's own collectives, called as nccl-tests calls them: one communicator whose calls block, one stream, memory of
// cudaMalloc().
#include <algorithm>
#include <cstring>
#include <memory>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "base/signals.h"
#include "bench/rivals/rivals.h"
#include "comm/agree.h"
#include "comm/nccl/nccl_api.h"

namespace lockstep::bench {
namespace {

using comm::NcclApi;

struct Free {
  void operator()(std::byte* data) const { static_cast<void>(cudaFree(data)); }
};
using DeviceMemory = std::unique_ptr<std::byte, Free>;

DeviceMemory allocate(std::size_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, bytes), "allocating memory for --compare nccl");
  return DeviceMemory(static_cast<std::byte*>(data));
}

class NcclRival final : public Rival {
 public:
  explicit NcclRival(comm::ProcessGroup& group)
      : api_(comm::load_nccl()),
        group_(group),
        rank_(group.rank()),
        size_(group.size()),
        done_(allocate(sizeof(std::int32_t))) {
    ncclUniqueId id{};
    comm::run_collectively(group, [&] {
      if (rank_ == 0) check(api_.get_unique_id(&id), "naming a communicator");
    });
    group.broadcast_host(&id, sizeof id, DType::kU8, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    comm::run_collectively(
        group, [&] { check(api_.comm_init_rank_config(&comm_, size_, id, rank_, &config), "joining the ranks"); });
  }
  ~NcclRival() override {
    if (comm_ != nullptr) static_cast<void>(api_.comm_abort(comm_));
  }

  bool has(const CollectiveOptions&) const override { return true; }

  void put(const std::byte* values, const std::byte* other, std::size_t bytes) override {
    if (bytes > bytes_) {
      values_ = allocate(bytes);
      other_ = allocate(bytes);
      bytes_ = bytes;
    }
    move(values_.get(), values, bytes, cudaMemcpyHostToDevice);
    move(other_.get(), other, bytes, cudaMemcpyHostToDevice);
  }
  void get(std::byte* values, std::byte* other, std::size_t bytes) override {
    move(values, values_.get(), bytes, cudaMemcpyDeviceToHost);
    move(other, other_.get(), bytes, cudaMemcpyDeviceToHost);
  }

  void run(const CollectiveOptions& options, std::byte*, std::byte*, std::size_t bytes) override {
    std::byte* const values = values_.get();
    std::byte* const other = other_.get();
    const ncclDataType_t type = comm::nccl_type_of(options.dtype);
    const ncclRedOp_t op = comm::nccl_reduction_of(options.op);
    const std::size_t count = bytes / size_of(options.dtype), part = count / static_cast<std::size_t>(size_);
    cudaStream_t const stream = stream_.get();
    switch (options.collective) {
      case Collective::kAllReduce: call(api_.all_reduce(values, values, count, type, op, comm_, stream)); break;
      case Collective::kReduceScatter: call(api_.reduce_scatter(values, other, part, type, op, comm_, stream)); break;
      case Collective::kAllGather: call(api_.all_gather(other, values, part, type, comm_, stream)); break;
      case Collective::kBroadcast:
        call(api_.broadcast(values, values, count, type, options.root, comm_, stream));
        break;
      case Collective::kReduce: call(api_.reduce(values, values, count, type, op, options.root, comm_, stream)); break;
      case Collective::kAllToAll: all_to_all(part, options.dtype); break;
      case Collective::kSendRecv: return send_and_receive(options.pattern, count, options.dtype);
      case Collective::kBarrier: signal(); break;
    }
    wait();
  }

  void shutdown() override {
    values_.reset();
    other_.reset();
    check(api_.comm_destroy(std::exchange(comm_, nullptr)), "ending a communicator");
  }

 private:
  void check(ncclResult_t result, const char* doing) const {
    if (result != ncclSuccess) comm::throw_nccl_error(api_, comm_, result, std::string("--compare nccl: ") + doing);
  }
  void call(ncclResult_t result) const { check(result, "an operation"); }

  static void move(std::byte* to, const std::byte* from, std::size_t bytes, cudaMemcpyKind way) {
    if (bytes > 0) check_cuda(cudaMemcpy(to, from, bytes, way), "copying for --compare nccl");
  }

  /// NCCL's kernels wait for ranks that have ended for as long as there are others.
  void wait() const {
    constexpr int kLooks = 4096;
    for (int looks = 1;; ++looks) {
      const cudaError_t state = cudaStreamQuery(stream_.get());
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) check_cuda(state, "--compare nccl");
      if (looks % kLooks != 0) continue;
      throw_if_stopped("measuring");
      group_.watch_peers();
    }
  }

  /// One number of each rank, as a barrier.
  void signal() const { call(api_.all_reduce(done_.get(), done_.get(), 1, ncclInt32, ncclSum, comm_, stream_.get())); }

  void all_to_all(std::size_t part, DType dtype) const {
    const ncclDataType_t type = comm::nccl_type_of(dtype);
    call(api_.group_start());
    for (int peer = 0; peer < size_; ++peer) {
      const std::size_t at = static_cast<std::size_t>(peer) * part * size_of(dtype);
      call(api_.send(values_.get() + at, part, type, peer, comm_, stream_.get()));
      call(api_.recv(other_.get() + at, part, type, peer, comm_, stream_.get()));
    }
    call(api_.group_end());
  }

  void send_and_receive(Pattern pattern, std::size_t count, DType dtype) const {
    const auto partners = partners_of(pattern, rank_, size_);
    if (!partners) return;
    const auto [to, from, first] = *partners;
    const ncclDataType_t type = comm::nccl_type_of(dtype);
    const auto send = [&, to = to] { call(api_.send(values_.get(), count, type, to, comm_, stream_.get())); };
    const auto receive = [&, from = from] { call(api_.recv(other_.get(), count, type, from, comm_, stream_.get())); };
    if (pattern == Pattern::kLatency) {
      // A stream's operations come one after the other: it is not waited for in between.
      if (first) send();
      receive();
      if (!first) send();
      return wait();
    }
    const bool sends = pattern != Pattern::kBandwidth || first, receives = pattern != Pattern::kBandwidth || !first;
    const int messages = pattern == Pattern::kRing ? 1 : window_of(count * size_of(dtype));
    for (int i = 0; i < messages; ++i) {
      call(api_.group_start());
      if (receives) receive();
      if (sends) send();
      call(api_.group_end());
    }
    if (pattern != Pattern::kRing) {  // that all have arrived
      const std::byte* const done = done_.get();
      call(first ? api_.recv(done_.get(), 1, ncclInt32, from, comm_, stream_.get())
                 : api_.send(done, 1, ncclInt32, to, comm_, stream_.get()));
    }
    wait();
  }

  const NcclApi& api_;
  comm::ProcessGroup& group_;
  const int rank_, size_;
  CudaStream stream_;
  DeviceMemory values_, other_, done_;
  std::size_t bytes_ = 0;
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<Rival> make_nccl_rival(const comm::World&, comm::ProcessGroup& group, std::string&) {
  return std::make_unique<NcclRival>(group);
}

}  // namespace lockstep::bench
