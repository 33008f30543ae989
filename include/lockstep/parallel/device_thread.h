// A thread that computes on one device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/base/function_ref.h"
#include "lockstep/base/misuse.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::parallel {

/// Sleeps until it is given work, which it does one piece after the other, on behalf of the thread that gives it
/// (ActsFor): start() and finish() alternate. The backend must outlive it.
class DeviceThread {
 public:
  explicit DeviceThread(nn::Backend& backend);
  /// Work that was begun is waited for.
  ~DeviceThread();
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;

  /// `work` is called here with `index`; it must stay valid until finish() has returned, or this has ended.
  void start(FunctionRef<void(std::size_t)> work, std::size_t index);
  /// Waits for it; what it has thrown, nullptr: nothing.
  std::exception_ptr finish();

  /// What the thread has computed for so far.
  std::chrono::nanoseconds cpu_time();

 private:
  void run();

  nn::Backend& backend_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<FunctionRef<void(std::size_t)>> work_;  // none: it sleeps
  std::size_t index_ = 0;
  ThreadId giver_ = nullptr;
  std::exception_ptr error_;
  bool ends_ = false;
  std::thread thread_;
};

/// The same of the calling thread.
std::chrono::nanoseconds cpu_time_of_this_thread();

}  // namespace lockstep::parallel
