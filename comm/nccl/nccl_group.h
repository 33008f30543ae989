// Collectives among GPUs, by NCCL.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/device.h"
#include "comm/process_group.h"

namespace lockstep {
class CudaEvent;
}

namespace lockstep::comm {

struct NcclApi;

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
/// Captures. A CUDA graph may hold operations. What is issued between begin_capture() and end_capture() is not done
/// then, and does not count. Each launch of the graph issues it anew, and the caller reports that by replayed(). The
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
  Device device_;
};

struct NcclOptions {
  int device = 0;       // among the GPUs that this process may see; becomes the calling thread's
  StreamView producer;  // of the computation on it, which the group's operations come after; must outlive the group
  Clock::duration timeout = std::chrono::seconds(300);
  const NcclApi* api = nullptr;  // another than the machine's, for tests; must outlive the group
};

/// Collective over `control`, the CPU's group of the same ranks, which must outlive the group: through it the ranks
/// agree that all of them have the same NCCL, exchange objects, and find out who is missing. Ranks that share a GPU run
/// on it alternately and reach each other over sockets, which is for trying things out: NCCL_HOSTID is set for them.
///
/// Throws DeviceError where this build or this machine cannot use GPUs, CudaError or NcclError where NCCL is missing or
/// fails, OutOfStepError where the ranks have different ones, TimeoutError naming the ranks that do not come; PeerError
/// where another rank has already said what is wrong.
///
/// Reductions are NCCL's: every rank has the same bits, in an order of its own choice (Note [Rank order]); what min and
/// max make of NaN is its choice too.
std::unique_ptr<DeviceGroup> make_nccl_group(ProcessGroup& control, const NcclOptions& options);

/// For a world of one: arenas on the GPU, and every operation done as soon as it is issued, in the order of the
/// producer's stream. Needs no NCCL, and uses no `api`. Throws DeviceError where there is no GPU.
std::unique_ptr<DeviceGroup> make_device_self_group(const NcclOptions& options);

}  // namespace lockstep::comm
