#include "trainer/in_flight.h"

#include <thread>

#include "lockstep/base/deadline.h"

namespace lockstep::trainer {
namespace {

// Looks without a pause at first: a step of a small model takes less than a sleep.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

std::span<const std::byte> wait_for(nn::AsyncDownload& download, FunctionRef<void()> while_waiting) {
  Clock::time_point begin{};
  while (!download.ready()) {
    while_waiting();
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  return download.bytes();
}

}  // namespace lockstep::trainer
