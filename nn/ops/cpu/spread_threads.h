// Keeps compute threads on processors of their own.
#pragma once

#include <sched.h>

#include <chrono>
#include <span>
#include <vector>

namespace lockstep::nn::cpu {

/// Sets `moves[i]` to the processor that thread i should move to, or to -1: it stays. `on[i]` is where thread i runs,
/// and `allowed[i]` are the processors that it may use, ascending. Of threads on one processor the first one stays, and
/// the others move to such as no thread of these runs on, as long as there are any. Allocates nothing.
void moves_apart(std::span<const int> on, std::span<const std::vector<int>> allowed, std::span<int> moves);

/// Note [Two compute threads on one processor]
/// If other programs keep all processors busy, Linux may put a thread on the processor of the thread that woke it up,
/// and leave both there: with two runnable threads on each processor the load is balanced. But each of the two then
/// waits for the other, while the other waits for the processor. So they are moved apart, once, and may run anywhere
/// again at once: threads that are started from these inherit no binding, and other jobs on the machine keep their
/// share.
class ThreadSpreader {
 public:
  using Processor = int (*)();  ///< the processor that the calling thread runs on; -1: unknown

  explicit ThreadSpreader(int threads, Processor processor = ::sched_getcpu);

  /// To be called once per step, by the thread that starts the others. Costs a parallel region every few milliseconds,
  /// and allocates nothing.
  /// Returns how many threads it has moved.
  int spread();

 private:
  int threads_;
  Processor processor_;
  std::vector<int> on_, moves_;  // of each thread
  std::vector<std::vector<int>> allowed_;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace lockstep::nn::cpu
