// Numbers that a device computes and that only the host's reports need.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::trainer {

/// Waits for what a download was begun with. Calls `while_waiting` again and again until it has arrived.
inline std::span<const std::byte> wait_for(nn::AsyncDownload& download, FunctionRef<void()> while_waiting) {
  // Looks without a pause at first: a step of a small model takes less than a sleep.
  constexpr auto kSpin = std::chrono::microseconds(200), kNap = std::chrono::microseconds(50);
  Clock::time_point begin{};
  while (!download.ready()) {
    while_waiting();
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  return download.bytes();
}

/// Steps that a device has been given, in order, each with the host's data and with numbers from the device. No step
/// waits for a number that is only for people. The backend must outlive it.
template <class Step>
class InFlight {
 public:
  /// Each step has `bytes` of numbers at most.
  InFlight(nn::Backend& backend, std::size_t bytes) {
    for (int i = 0; i <= backend.steps_ahead(); ++i) ring_.push_back({{}, backend.make_async_download(bytes)});
  }

  /// Takes `numbers` as it is when all work given before is done. At most Backend::steps_ahead() + 1 may be waiting.
  void add(Step step, const nn::Tensor& numbers) {
    LOCKSTEP_ASSERT(!full(), "{} steps are in flight", waiting_);
    Entry& entry = ring_[(oldest_ + waiting_) % ring_.size()];
    entry.step = std::move(step);
    entry.numbers->begin(numbers);
    ++waiting_;
  }
  std::size_t waiting() const { return waiting_; }
  /// Whether the oldest one must be taken before the next is added.
  bool full() const { return waiting_ == ring_.size(); }
  /// The oldest one, with its numbers, which are there until the next add(). Calls `while_waiting` until they are.
  std::pair<Step, std::span<const std::byte>> take(FunctionRef<void()> while_waiting) {
    LOCKSTEP_ASSERT(waiting_ > 0, "no step is in flight");
    Entry& entry = ring_[oldest_];
    const auto numbers = wait_for(*entry.numbers, while_waiting);
    oldest_ = (oldest_ + 1) % ring_.size();
    --waiting_;
    return {std::move(entry.step), numbers};
  }

 private:
  struct Entry {
    Step step;
    std::unique_ptr<nn::AsyncDownload> numbers;
  };
  std::vector<Entry> ring_;
  std::size_t oldest_ = 0, waiting_ = 0;
};

}  // namespace lockstep::trainer
