#include "trainer/late_results.h"

#include <thread>

#include "base/deadline.h"

namespace lockstep::trainer {
namespace {

// Looks without a pause at first: a step of a small model takes less than a sleep.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

LateResults::LateResults(nn::Backend& backend, std::size_t bytes) {
  for (int i = 0; i <= backend.steps_ahead(); ++i) readbacks_.push_back(backend.make_readback(bytes));
}

void LateResults::add(const nn::Tensor& from) {
  LOCKSTEP_ASSERT(!full(), "{} results are waiting", waiting_);
  readbacks_[(oldest_ + waiting_) % readbacks_.size()]->begin(from);
  ++waiting_;
}

std::span<const std::byte> LateResults::take(FunctionRef<void()> while_waiting) {
  LOCKSTEP_ASSERT(waiting_ > 0, "no result is waiting");
  nn::Readback& readback = *readbacks_[oldest_];
  Clock::time_point begin{};
  while (!readback.ready()) {
    while_waiting();
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  oldest_ = (oldest_ + 1) % readbacks_.size();
  --waiting_;
  return readback.bytes();
}

}  // namespace lockstep::trainer
