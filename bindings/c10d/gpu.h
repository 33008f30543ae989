// Collectives on tensors on a GPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/c10d/work.h"
#include "lockstep/comm/device_group.h"

namespace lockstep::pytorch {

/// A place in a GPU's work. wait() orders the calling thread's current stream after it, and returns at once; with a
/// timeout of its own it waits on the host, too.
class GpuWork final : public Work {
 public:
  GpuWork(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
          std::vector<at::Tensor> outputs, c10::Device device)
      : Work(rank, type, title, inputs, std::move(outputs)), device_(device), done_(device.type()) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  friend class GpuOperations;

  const c10::Device device_;
  c10::Event done_;
};

/// The collectives of a group's ranks on their GPUs, one of each, by NCCL, in the order in which they come. Each comes
/// after what the stream that is current at its call was given before; the host waits for nothing. PyTorch's part of it
/// (temporary tensors, averages, the future's callbacks) and the collectives themselves are in the order of a stream of
/// their own. Thread-safe.
///
/// Nobody need look at a work for its failure to be found: a thread does while there are any. What the GPU has computed
/// from the values of one that has failed is worthless, and the program may have passed its wait(). So, as PyTorch's
/// own backend for NCCL does, that thread says what has happened and ends the process.
class GpuOperations {
 public:
  /// Whether PyTorch, and the lockstep that this is linked with, have what it takes; else why not.
  static std::string why_not();

  /// Collective, blocking. `control` is the CPU's group of the same ranks, for this alone. Throws lockstep's Error.
  static std::shared_ptr<GpuOperations> join(std::unique_ptr<comm::ProcessGroup> control, c10::Device device);

  c10::Device device() const { return device_; }
  /// `body` issues the operation: as those of Operations, on a group that is a DeviceGroup. `inputs` are the work's.
  void issue(c10::intrusive_ptr<GpuWork> work, const std::vector<at::Tensor>& inputs, std::chrono::milliseconds timeout,
             const Body& body);
  /// Whether an operation has failed.
  bool failed();
  /// Collective: ends the group in order. Throws lockstep's Error, or nothing where it has ended.
  void end(Deadline deadline);
  /// Nothing is issued any more, and nobody waited for.
  void abandon();

 private:
  GpuOperations(std::unique_ptr<comm::ProcessGroup> control, c10::Device device);
  void watch();
  [[noreturn]] static void give_up(const std::exception& error);

  const c10::Device device_;
  const c10::Stream stream_;
  std::unique_ptr<comm::ProcessGroup> control_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<comm::DeviceGroup> group_;  // nullptr: it has ended
  bool failed_ = false;
  struct UnderWay {
    comm::Work work;
    Deadline deadline;
  };
  std::deque<UnderWay> under_way_;
};

}  // namespace lockstep::pytorch
