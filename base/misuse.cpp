#include "lockstep/base/misuse.h"

#include <pthread.h>

#include <mutex>
#include <utility>

namespace lockstep {
namespace {

struct Identity {
  ThreadId acts_for = this;  // itself
};
thread_local Identity identity;

std::atomic<std::uint64_t> forks_so_far{0};

}  // namespace

// Counters that nobody owns. As many exist as there were owners at once, and they stay: references outlive owners.
struct Lifetime::Pool {
  std::mutex mutex;
  Counter* first = nullptr;

  static Pool& get() {
    static Pool* const pool = new Pool;  // not destroyed at exit, when owners may still be
    return *pool;
  }
};

Lifetime::Lifetime() {
  Pool& pool = Pool::get();
  {
    const std::lock_guard lock(pool.mutex);
    counter_ = pool.first;
    if (counter_ != nullptr) pool.first = counter_->next;
  }
  if (counter_ == nullptr) counter_ = new Counter;
  expected_ = counter_->value.load(std::memory_order_relaxed);
}

Lifetime::~Lifetime() {
  renew();
  Pool& pool = Pool::get();
  const std::lock_guard lock(pool.mutex);
  counter_->next = pool.first;
  pool.first = counter_;
}

ThreadId this_thread() noexcept { return identity.acts_for; }

std::uint64_t forks() noexcept {
  [[maybe_unused]] static const int counted =
      ::pthread_atfork(nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });
  return forks_so_far.load(std::memory_order_relaxed);
}

ActsFor::ActsFor(ThreadId other) noexcept : before_(std::exchange(identity.acts_for, other)) {}

ActsFor::~ActsFor() { identity.acts_for = before_; }

}  // namespace lockstep
