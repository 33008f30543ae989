#include "trainer/async_scalars.h"

#include <thread>

#include "base/deadline.h"

namespace lockstep::trainer {
namespace {

// Looks without a pause at first: a step of a small model takes less than a sleep.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

AsyncScalars::AsyncScalars(nn::Backend& backend, std::size_t bytes) {
  for (int i = 0; i <= backend.steps_ahead(); ++i) downloads_.push_back(backend.make_async_download(bytes));
}

void AsyncScalars::add(const nn::Tensor& from) {
  LOCKSTEP_ASSERT(!full(), "{} results are waiting", waiting_);
  downloads_[(oldest_ + waiting_) % downloads_.size()]->begin(from);
  ++waiting_;
}

std::span<const std::byte> AsyncScalars::take(FunctionRef<void()> while_waiting) {
  LOCKSTEP_ASSERT(waiting_ > 0, "no result is waiting");
  nn::AsyncDownload& download = *downloads_[oldest_];
  Clock::time_point begin{};
  while (!download.ready()) {
    while_waiting();
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  oldest_ = (oldest_ + 1) % downloads_.size();
  --waiting_;
  return download.bytes();
}

}  // namespace lockstep::trainer
