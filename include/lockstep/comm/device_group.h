// Collectives among GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {
class CudaEvent;
}

namespace lockstep::comm {

/// When an operation ran on the GPU, from when the data and the stream were ready for it: the time that it waited for
/// other ranks is its own.
struct OpTime {
  std::uint64_t sequence = 0;
  OpKind kind = OpKind::kBarrier;
  std::size_t bytes = 0;
  double begin_ms = 0;  // after the origin
  double end_ms = 0;
};

/// A group whose arenas are on a GPU. Operations come after what the producer's stream was given before they are
/// issued, and whoever uses their results is ordered after them by Work::wait(): nothing waits on the host.
///
/// Note [Memory of the caller's]
/// The functions that take addresses work on memory of this GPU that no group has allocated, as tensors of PyTorch are,
/// where it is: all ranks have values at a multiple of their size. Where a rank has a part, it is `count` values,
/// whatever that comes to in bytes. The memory stays, and only streams that Work::wait() has ordered after the
/// operation use it. Threads: once the producer's stream has been ordered after it, an operation is complete for
/// another thread that takes over. NCCL registers none of it.
///
/// Captures. A CUDA graph may hold operations. What is issued between begin_capture() and end_capture() is not done
/// then, and does not count. Each launch of the graph issues it again, and the caller reports that by replayed(). The
/// Works of a capture are those of the next launch.
///   group.begin_capture();
///   cudaStreamBeginCapture(producer, cudaStreamCaptureModeThreadLocal);
///   …                                  // operations, each waited for by the producer's stream: Work::wait(producer)
///   cudaStreamEndCapture(producer, …);
///   const auto count = group.end_capture();
///   for each step: cudaGraphLaunch(…, producer); group.replayed(count);
/// Before a capture, and before a launch, the producer's stream has waited for everything that was issued before.
/// Captures are collective, and so are launches. Between begin_capture() and end_capture() the host may wait for
/// nothing, and reach no arena. A capture that CUDA ends with an error leaves the group as it was. Graphs must be gone
/// before shutdown().
class DeviceGroup : public ProcessGroup {
 public:
  Device device() const final { return device_; }

  using ProcessGroup::all_gather;
  using ProcessGroup::all_reduce;
  using ProcessGroup::broadcast;
  using ProcessGroup::reduce;
  using ProcessGroup::reduce_scatter;
  /// In place (Note [Memory of the caller's]).
  Work all_reduce(void* values, std::size_t count, DType dtype, ReduceOp op) {
    return issue_at(OpKind::kAllReduce, op, 0, values, count, dtype);
  }
  /// Rank `root`'s `values` become the reduction of all ranks'; those of the others are unspecified afterwards.
  Work reduce(void* values, std::size_t count, DType dtype, ReduceOp op, int root) {
    return issue_at(OpKind::kReduce, op, root, values, count, dtype);
  }
  Work broadcast(void* values, std::size_t count, DType dtype, int root) {
    return issue_at(OpKind::kBroadcast, ReduceOp::kSum, root, values, count, dtype);
  }
  /// `all`, size() * `count` values, become every rank's `mine`, in rank order. `mine` may be its place in `all`; else
  /// the two do not overlap.
  Work all_gather(const void* mine, std::size_t count, DType dtype, void* all) {
    return issue_at(OpKind::kAllGather, ReduceOp::kSum, 0, all, count * ranks(), dtype, const_cast<void*>(mine));
  }
  /// `mine` becomes the reduction of this rank's part of all ranks' `all`, which keep what they have unless `mine` is
  /// its place there; else the two do not overlap.
  Work reduce_scatter(const void* all, void* mine, std::size_t count, DType dtype, ReduceOp op) {
    return issue_at(OpKind::kReduceScatter, op, 0, const_cast<void*>(all), count * ranks(), dtype, mine);
  }

  /// The operation that was issued last.
  Work last() { return Work(this, last_issued()); }

  void begin_capture() override = 0;
  std::uint64_t end_capture() override = 0;
  void replayed(std::uint64_t count) override = 0;

  /// Whether operations issued from now on are timed; turning it on forgets those before. Captured ones never are.
  virtual void time_operations(bool on) = 0;
  /// Of the operations that were timed, in order; blocks until they are done. `origin` is an event with timing that has
  /// been recorded on this GPU.
  virtual std::vector<OpTime> device_times(const CudaEvent& origin) = 0;

 protected:
  DeviceGroup(int rank, int size, Clock::duration timeout, int device)
      : ProcessGroup(rank, size, timeout), device_{DeviceKind::kCuda, device} {}

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(size()); }

  Device device_;
};

struct DeviceGroupOptions {
  int device = 0;       // among the GPUs that this process may see; becomes the calling thread's
  StreamView producer;  // of the computation on it, which the group's operations come after; must outlive the group
  std::optional<Clock::duration> timeout = {};  // default: `control`'s; without one 300 s
};

/// Joins the GPUs of the ranks of `control`, the CPU's group, which must outlive it; collective. `backend` is a name as
/// GroupOptions::backend has it; one that joins processes stands for the automatic choice. In a world of one it is
/// make_device_self_group(). Throws UsageError for an unknown name, and what the backend does.
std::unique_ptr<DeviceGroup> make_device_group(ProcessGroup& control, const DeviceGroupOptions& options,
                                               const std::string& backend = kAutoBackend);

/// For a world of one: arenas on the GPU, and every operation done as soon as it is issued, in the order of the
/// producer's stream. Needs no library of collectives. Throws DeviceError where there is no GPU.
std::unique_ptr<DeviceGroup> make_device_self_group(const DeviceGroupOptions& options);

}  // namespace lockstep::comm
