// Stacks to switch between, all on one thread.
#pragma once

#include <cstddef>

namespace lockstep::soft_cuda {

/// A stack of its own, with a page below it that faults. Neither copied nor moved.
class Fiber {
 public:
  /// `number` spreads stacks over the lines of a cache.
  explicit Fiber(std::size_t number);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// The next enter() starts `entry`, which must never return; what the fiber was at is forgotten.
  void prepare(void (*entry)());
  /// Goes on in this fiber, until it calls leave().
  void enter();
  /// From within: goes on behind enter().
  void leave();

 private:
  struct State;
  std::byte* memory_ = nullptr;
  State* state_ = nullptr;
};

}  // namespace lockstep::soft_cuda
