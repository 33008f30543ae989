#include "comm/shm/wakeup.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace lockstep::comm {

// The sleeper writes `asleep` and reads what it waits for; the waker writes that and reads `asleep`. With a full fence
// between the two on both sides, one of them sees the other.

void wake(RankControlBlock& control) {
  if (control.asleep.load(std::memory_order_relaxed) == 0) return;
  control.wakeups.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &control.wakeups, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

std::uint32_t announce_sleep(RankControlBlock& control) {
  const auto ticket = control.wakeups.load(std::memory_order_acquire);
  control.asleep.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return ticket;
}

void sleep(RankControlBlock& control, std::uint32_t ticket, Clock::duration at_most) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count();
  const timespec timeout{static_cast<std::time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  ::syscall(SYS_futex, &control.wakeups, FUTEX_WAIT, ticket, &timeout, nullptr, 0);
}

void end_sleep(RankControlBlock& control) { control.asleep.store(0, std::memory_order_relaxed); }

}  // namespace lockstep::comm
