// The first failure of something that cannot be used after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::comm {

/// Whether a number sent by another process is the exit code of a failure. Zero is not: no message makes a rank end as
/// if it had succeeded. Nor is a code that no process ends with, such as 256, which becomes zero.
constexpr bool is_failure(std::int64_t exit_code) { return exit_code >= 1 && exit_code <= 255; }
/// That code, or kInternal's in the place of one that is none.
constexpr int failure_code(std::int64_t exit_code) {
  return is_failure(exit_code) ? static_cast<int>(exit_code) : static_cast<int>(ExitCode::kInternal);
}

/// The first failure of a group; every later call on the group throws it. Thread-safe; reading an intact one costs a
/// load.
class Failure {
 public:
  void throw_if_any() const {
    if (!any_.load(std::memory_order_acquire)) [[likely]]
      return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(first_);
  }

  /// Later ones are dropped. `failure` is not null.
  void set(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (first_ != nullptr) return;
    first_ = std::move(failure);
    any_.store(true, std::memory_order_release);
  }

  /// Runs `action`, under no lock, unless there is a failure; what it throws is one, and passes through.
  template <class Action>
  auto guard(Action&& action) {
    throw_if_any();
    try {
      return action();
    } catch (...) {
      set(std::current_exception());
      throw;
    }
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::exception_ptr first_;  // guarded by mutex_
};

}  // namespace lockstep::comm
