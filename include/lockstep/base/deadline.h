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

/// `seconds` as a duration of the clock, clamped to 0 (also for NaN) to 30 years: any number is valid, none overflows.
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

/// Note [Time that counts]
/// Several processes may be stopped together (SIGSTOP, a scheduler that suspends a job, a container's pause, a laptop's
/// lid). None of them may then report the others as silent. So deadlines count only the time in which their own process
/// ran. A thread wakes up every kTick. If it wakes up later than kMost, the process counts as stopped, and the time is
/// left out from the first reading after it on. A process that is stopped alone is still missed by those that run.

/// Time that counts for deadlines. The same as Clock's but for an offset.
struct RunningClock {
  using duration = Clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunningClock>;
  static constexpr bool is_steady = true;

  static constexpr duration kTick = Millis(100), kMost = Millis(500);

  static time_point now() noexcept;
  /// Starts the thread, once in a process; before, and in processes that are forked, stops count. Throws DeviceError
  /// where no thread can be started.
  static void start();
};

class Deadline {
 public:
  static Deadline after(Clock::duration timeout) { return Deadline(RunningClock::now() + timeout); }
  static Deadline after_seconds(double seconds) { return after(duration_of(seconds)); }
  /// For waits on this process's own threads only: anything that depends on another process has a deadline.
  static Deadline never() { return Deadline(RunningClock::time_point::max()); }

  bool expired() const { return when_ != RunningClock::time_point::max() && RunningClock::now() >= when_; }
  RunningClock::time_point when() const { return when_; }
  /// Time left, at least zero; capped at one day so that it can be handed to any wait function.
  Clock::duration remaining() const {
    const auto now = RunningClock::now();
    if (now >= when_) return Clock::duration::zero();
    const auto day = std::chrono::hours(24);
    return when_ - now < day ? when_ - now : Clock::duration(day);
  }

 private:
  explicit Deadline(RunningClock::time_point when) : when_(when) {}
  RunningClock::time_point when_;
};

}  // namespace lockstep
