#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/signals.h"
#include "lockstep/base/deadline.h"

namespace lockstep {
namespace {

// In ns of Clock. What was left out so far, and how far the running time may come before the next tick.
std::atomic<std::int64_t> left_out = 0, most = std::numeric_limits<std::int64_t>::max();

std::int64_t real_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

constexpr std::int64_t kMostNs = std::chrono::nanoseconds(RunningClock::kMost).count();

// What was left out is known before how far it may come: a reader that sees the second sees the first.
[[noreturn]] void tick() {
  std::int64_t last = real_ns();
  most.store(last - left_out + kMostNs, std::memory_order_release);
  while (true) {
    std::this_thread::sleep_for(RunningClock::kTick);
    const std::int64_t now = real_ns();
    const std::int64_t stopped = std::max<std::int64_t>(0, now - last - kMostNs);
    left_out.store(left_out + stopped, std::memory_order_release);
    most.store(now - left_out + kMostNs, std::memory_order_release);
    last = now;
  }
}

}  // namespace

RunningClock::time_point RunningClock::now() noexcept {
  const std::int64_t bound = most.load(std::memory_order_acquire);
  const std::int64_t running = real_ns() - left_out.load(std::memory_order_acquire);
  return time_point(std::chrono::nanoseconds(std::min(running, bound)));
}

void RunningClock::start() {
  static std::mutex mutex;
  static std::atomic<bool> started = false;
  static bool survives_forks = false;
  const std::lock_guard lock(mutex);
  if (started) return;
  // A process that is forked has no such thread.
  const auto in_child = [] {
    most = std::numeric_limits<std::int64_t>::max();
    started = false;
  };
  if (!std::exchange(survives_forks, true)) ::pthread_atfork(nullptr, nullptr, in_child);
  start_thread(tick).detach();
  started = true;
}

}  // namespace lockstep
