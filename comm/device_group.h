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
