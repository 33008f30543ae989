// Stacks to switch between, all on one thread at a time.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>

namespace lockstep::soft_cuda {

/// A stretch of addresses.
struct Stretch {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
};

/// A stack of its own, with a page below it that faults. Neither copied nor moved.
class Fiber {
 public:
  static constexpr std::size_t kMost = 1056;
  /// Where all of them lie.
  static const Stretch& stacks() { return all_stacks; }

  /// `number`, below kMost and unlike that of others, says where it lies.
  explicit Fiber(std::size_t number);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Whoever gets here next begins `entry`, which must never return; what the fiber was at is forgotten.
  void prepare(void (*entry)());
  /// From outside of all fibers: continues in this one. Returns when one of them leaves.
  void enter();
  /// From within this fiber: continues in `next`.
  void go_to(Fiber& next);
  /// From within this fiber: continues after enter().
  void leave();

 private:
#if defined(__x86_64__) && !defined(LOCKSTEP_SOFT_CUDA_UCONTEXT)
  using Context = void*;  // the stack's pointer; all else lies on the stack
#else
  using Context = ucontext_t;
#endif
  static void switch_to(Context& from, Context& to);
  static Context outside;
  static Stretch all_stacks;

  std::byte* memory_ = nullptr;
  std::byte* top_ = nullptr;
  Context inside_{};
};

}  // namespace lockstep::soft_cuda
