// Sends and receives between two GPUs, by NCCL.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/cuda/runtime.h"
#include "comm/nccl/communicator.h"
#include "comm/pairs.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Note [Pairs of GPUs]
/// Each direction between two ranks has a communicator of these two and a stream of its own, made when the first
/// transfer comes: so transfers wait neither for collectives nor for those the other way. The sender announces each
/// transfer through the control group. The receiver compares it with what it expects, and gives NCCL nothing
/// before: NCCL itself would wait without end for ranks that mean different sizes, or mix their data. Nothing blocks:
/// ids, communicators and calls that NCCL continues in the background are looked at in advance().
///
/// One thread uses it.
class DevicePairs {
 public:
  /// `api` and `control`, the CPU's group of the same ranks, must outlive it. Transfers come after what `producer` was
  /// given before.
  DevicePairs(const NcclApi& api, int device, ProcessGroup& control, StreamView producer);
  ~DevicePairs();

  void start(std::shared_ptr<PairTransfer> transfer);
  bool idle() const { return under_way_ == 0; }
  /// Does what can be done now; whether anything was. Throws OutOfStepError, and NcclError or CudaError.
  bool advance();
  /// Changes when something has moved.
  std::uint64_t progress() const { return progress_; }
  /// One that the GPU has been given and that is not done; nullptr: there is none.
  const PairTransfer* first_launched() const;
  /// Whether the GPU has been given the transfer.
  bool is_launched(const PairTransfer& transfer) const;
  /// "rank 1".
  std::string name_of(int rank) const;
  /// Orders `stream` after it; it is launched.
  void make_wait(const PairTransfer& transfer, cudaStream_t stream) const;

  /// Collective, when nothing is under way: ends all communicators in an orderly way.
  void leave(FunctionRef<void()> look);
  /// Needs nobody.
  void abort() noexcept;

 private:
  struct Channel;
  struct Pending;

  Channel& channel_of(const PairTransfer& transfer);
  const Pending* find(const PairTransfer& transfer) const;
  bool join(Channel& channel);
  bool launch_next(Channel& channel);
  bool settle(Channel& channel);
  bool finish_first(Channel& channel);

  const NcclApi& api_;
  const int device_;
  ProcessGroup& control_;
  const StreamView producer_;
  // By sender and receiver: all ranks end those that they share in the same order.
  std::map<std::pair<int, int>, std::unique_ptr<Channel>> channels_;
  std::size_t under_way_ = 0;
  std::uint64_t progress_ = 0;
};

}  // namespace lockstep::comm
