// Finds misuse of objects: handles know whether their object still exists, and an object knows whether the thread that
// uses it is the right one.
#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep {

/// A member of what others refer to. Its references expire when it is destroyed, or renewed; asking one costs a load
/// and a compare. Their counters lie in memory that is never given back, so a reference may be asked for as
/// long as the process lives. A reference is a plain value: copying it is free.
///
/// It finds mistakes and is no lock: an object that is alive now may end on another thread a moment later. Any thread
/// may ask a reference; only the owner's thread calls ref() and renew().
class Lifetime {
 public:
  class Ref {
   public:
    /// To nothing: expired.
    Ref() = default;
    bool alive() const { return value_ != nullptr && value_->load(std::memory_order_relaxed) == expected_; }
    /// Whether both were taken from the same object, between the same renewals.
    friend bool operator==(const Ref&, const Ref&) = default;

   private:
    friend class Lifetime;
    Ref(const std::atomic<std::uint64_t>* value, std::uint64_t expected) : value_(value), expected_(expected) {}

    const std::atomic<std::uint64_t>* value_ = nullptr;
    std::uint64_t expected_ = 0;
  };

  Lifetime();
  ~Lifetime();
  Lifetime(const Lifetime&) = delete;
  Lifetime& operator=(const Lifetime&) = delete;

  Ref ref() const { return {&counter_->value, expected_}; }
  /// All references that have been taken so far expire.
  void renew() { counter_->value.store(++expected_, std::memory_order_relaxed); }

 private:
  struct Counter {
    std::atomic<std::uint64_t> value{0};  // never goes back: a counter that is used again expires no reference anew
    Counter* next = nullptr;
  };
  struct Pool;

  Counter* counter_;
  std::uint64_t expected_;
};

/// Identifies a thread among those that live: to be compared, and nothing else. Never nullptr. Costs a call and a load.
using ThreadId = const void*;
ThreadId this_thread() noexcept;

/// How many times fork() lies between the process that called this first and the calling one, which may be its child.
std::uint64_t forks() noexcept;

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
