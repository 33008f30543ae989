// How a thread waits for something that it must look at again and again.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

#include "base/deadline.h"

namespace lockstep::comm {

/// Looks as often as possible at first, then lets other processes have the core between looks, then sleeps: short
/// waits end at once, long ones cost next to nothing. With `generous` (more processes than cores) the first stage is
/// skipped: what is waited for needs this core.
class Backoff {
 public:
  explicit Backoff(bool generous) : generous_(generous) {}

  /// Something happened: the next wait begins anew.
  void reset() { looks_ = 0; }

  /// Call it after a look that found nothing. True now and then: time for what is too slow for every look, such as
  /// reading the clock.
  bool pause() {
    ++looks_;
    if (!generous_ && looks_ <= kSpins) return looks_ % kLooksPerReading == 0;
    if (looks_ == kSpins + 1 || looks_ == 1) idle_since_ = Clock::now();
    ::sched_yield();
    if (looks_ % kLooksPerReading != 0) return false;
    const auto idle = Clock::now() - idle_since_;
    if (idle > kLong)
      std::this_thread::sleep_for(kLongSleep);
    else if (idle > kShort)
      std::this_thread::sleep_for(kShortSleep);
    return true;
  }

 private:
  static constexpr unsigned kSpins = 500;
  static constexpr unsigned kLooksPerReading = 8;
  static constexpr auto kShort = std::chrono::milliseconds(20);
  static constexpr auto kLong = std::chrono::milliseconds(500);
  static constexpr auto kShortSleep = std::chrono::microseconds(50);
  static constexpr auto kLongSleep = std::chrono::microseconds(200);

  bool generous_;
  unsigned looks_ = 0;
  Clock::time_point idle_since_;
};

}  // namespace lockstep::comm
