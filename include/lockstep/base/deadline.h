// A point in time after which a wait gives up. Every wait in lockstep takes one.
#pragma once

#include <chrono>
#include <ctime>

namespace lockstep {

using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

/// Seconds between two clock readings, as a number for reports.
inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// `seconds` as the clock counts, between 0 (also for NaN) and 30 years: any number will do, and none overflows.
inline Clock::duration duration_of(double seconds) {
  constexpr double kMost = 1e9;
  const double bounded = seconds > 0 ? (seconds < kMost ? seconds : kMost) : 0;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

/// For system calls that take a time. `duration` is at least zero.
inline timespec timespec_of(Clock::duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  return {static_cast<std::time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

class Deadline {
 public:
  static Deadline after(Clock::duration timeout) { return Deadline(Clock::now() + timeout); }
  static Deadline after_seconds(double seconds) { return after(duration_of(seconds)); }
  /// For waits on this process's own threads only: anything that depends on another process has a deadline.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool expired() const { return when_ != Clock::time_point::max() && Clock::now() >= when_; }
  Clock::time_point when() const { return when_; }
  /// Time left, at least zero; capped at one day so that it can be handed to any wait function.
  Clock::duration remaining() const {
    const auto now = Clock::now();
    if (now >= when_) return Clock::duration::zero();
    const auto day = std::chrono::hours(24);
    return when_ - now < day ? when_ - now : Clock::duration(day);
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace lockstep
