#include "comm/wait.h"

#include <thread>

namespace lockstep::comm {

void nap(Clock::duration idle) {
  constexpr auto kShort = std::chrono::milliseconds(20), kLong = std::chrono::milliseconds(500);
  if (idle <= kShort)
    ::sched_yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(idle <= kLong ? 50 : 200));
}

void await_own_stop_request() {
  // Between the end of a rank that was asked to stop and the same request to the next one, on a busy machine.
  constexpr auto kStopStraggles = std::chrono::milliseconds(50);
  std::this_thread::sleep_for(kStopStraggles);
  throw_if_stopped("waiting for the other ranks");
}

}  // namespace lockstep::comm
