// The c10d backend "lockstep": torch.distributed over a lockstep group.
#pragma once

#include "lockstep/comm.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "bindings/c10d/gpu.h"
#include "bindings/c10d/messages.h"
#include "bindings/c10d/work.h"

namespace lockstep::pytorch {

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

/// Tensors are dense ones on the CPU or on this rank's GPU, contiguous or not, of any size. Operations that move
/// elements take all types; reductions those of class Reduction. What a call cannot take it refuses at once
/// (TORCH_CHECK); what goes wrong later is the work's: wait() throws DistBackendError, and so does the future.
///
/// Ranks that share memory complete a collective within the call that issues it: DDP waits for futures that nobody else
/// would move on, and another thread would only take the core from this one. Between hosts a thread of the group does.
/// Sends and receives go over a group of their own (Messages). Collectives on a GPU are NCCL's (GpuOperations), joined
/// by the first one; gather, scatter, all-to-all, sends and receives go through the host's memory.
///
/// Thread-safe. All ranks issue the same collectives of a group in the same order. shutdown() ends the group in order;
/// without it, nothing is waited for. Afterwards every call is refused (TORCH_CHECK).
class Backend final : public ::c10d::Backend {
 public:
  struct Settings {
    std::chrono::milliseconds timeout = kBackendDefaultTimeout;
    std::vector<int> job_ranks;  // of the group's ranks; empty: the same numbers
    bool encrypt = false;
    double stall_warning_seconds = 10;
  };
  /// Collective, blocking: joins the ranks through `store`. Throws c10::DistBackendError.
  Backend(c10::intrusive_ptr<::c10d::Store> store, int rank, int size, const Settings& settings);
  ~Backend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions();     // not virtual in PyTorch 2.7
  void setTimeout(std::chrono::milliseconds timeout);  // virtual since PyTorch 2.11
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override;
  /// What has not begun fails, and all messages do. A collective under way ends by its timeout at the latest.
  void abort() override;

  // Memory in which ranks of one host reduce without copies: DistributedDataParallel asks for its buckets there.
  // Collective, as those are. Not virtual in every PyTorch that is taken.
  bool supportsTensorAlloc(c10::DeviceIndex device);
  at::Tensor allocateTensor(long size, at::TensorOptions options = {});

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const ::c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const ::c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const ::c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const ::c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const ::c10d::GatherOptions& options) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const ::c10d::GatherOptions& options);  // virtual since PyTorch 2.15
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const ::c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const ::c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const ::c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& options) override;

  // No part of the order of collectives. Messages between two ranks are received in the order sent; another tag than
  // the sender's is an error.
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 private:
  std::unique_ptr<comm::ProcessGroup> join_once_more();

  /// Issues `body` as the group's next collective, where the tensors are.
  WorkPtr submit(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, Body body);
  WorkPtr submit_on_host(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                         std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, Body body);
  std::shared_ptr<GpuOperations> gpu_operations(c10::Device device);
  std::shared_ptr<GpuOperations> end_of_gpu();
  std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) const;
  WorkPtr submit_message(::c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors, int peer,
                         int tag);
  void check_process() const;
  void check_root(std::int64_t root, const char* doing) const;
  std::size_t ranks() const { return static_cast<std::size_t>(getSize()); }

  const std::shared_ptr<comm::KeyValueStore> store_;
  const Settings settings_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<Operations> operations_;
  std::shared_ptr<Messages> messages_;  // nullptr: this is the only rank
  std::mutex gpu_mutex_;
  std::shared_ptr<GpuOperations> gpu_;  // nullptr: there was none yet
  bool gpu_ended_ = false;
  std::atomic<std::uint64_t> sequence_{0};
  const std::uint64_t forks_ = forks();  // of the process that has made it
};

}  // namespace lockstep::pytorch
