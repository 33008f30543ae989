// Which thread uses what only one thread at a time may use.
#pragma once

namespace lockstep {

/// Identifies a thread among those that live: to be compared, and nothing else. Never nullptr. Costs a call and a load.
using ThreadId = const void*;
ThreadId this_thread() noexcept;

/// While one lives, the calling thread works for another thread, which waits for it, and has that thread's identity.
/// Destroy it on the thread that made it; of several, the last one first.
class ActsFor {
 public:
  explicit ActsFor(ThreadId other) noexcept;
  ~ActsFor();
  ActsFor(const ActsFor&) = delete;
  ActsFor& operator=(const ActsFor&) = delete;

 private:
  ThreadId before_;
};

}  // namespace lockstep
