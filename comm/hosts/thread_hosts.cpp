#include "comm/hosts/thread_hosts.h"

#include <algorithm>

#include "base/error.h"
#include "base/signals.h"
#include "base/stop.h"
#include "comm/mpi/backoff.h"

namespace lockstep::comm {
namespace {

// The longest sleep while operations are under way, and the time between two looks at the other ranks.
constexpr auto kThreadNap = std::chrono::milliseconds(20);
// While none are.
constexpr auto kLongNap = std::chrono::seconds(1);
constexpr int kSpins = 50;

}  // namespace

ThreadHosts::ThreadHosts(std::unique_ptr<Store> store, HostMeeting met, Clock::duration timeout)
    : HostsGroup(std::move(store), std::move(met), timeout) {
  issued_.reserve(256);
  taken_.reserve(256);
  // Signals are for the threads that look at stop requests.
  const AllSignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

ThreadHosts::~ThreadHosts() { end_thread(); }

// ---- The caller's side ----

std::uint64_t ThreadHosts::hand_over(const HostEngine::Order& order) {
  failure_.throw_if_any();
  std::uint64_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    issued_.push_back(order);
    index = handed_.fetch_add(1, std::memory_order_release) + 1;
  }
  engine_.wake_up();
  return index;
}

bool ThreadHosts::is_done(std::uint64_t sequence) {
  failure_.throw_if_any();
  return completed_sequence_.load(std::memory_order_acquire) >= sequence;
}

void ThreadHosts::wait_done(std::uint64_t sequence, Deadline deadline) {
  wait_until([&] { return completed_sequence_.load(std::memory_order_acquire) >= sequence; }, deadline);
}

void ThreadHosts::wait_for_index(std::uint64_t index, Deadline deadline) {
  wait_until([&] { return completed_.load(std::memory_order_acquire) >= index; }, deadline);
}

template <class Condition>
void ThreadHosts::wait_until(Condition&& done, Deadline deadline) {
  wait_begin_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  wait_end_.store(deadline.when().time_since_epoch().count(), std::memory_order_release);
  Backoff backoff(engine_.oversubscribed());
  while (!done()) {
    failure_.guard([] { throw_if_stopped("waiting for the other ranks"); });
    backoff.pause();
  }
  wait_end_.store(kNoWait, std::memory_order_relaxed);
}

void ThreadHosts::shutdown() {
  barrier().wait_host();
  end_thread();
  failure_.guard([&] { store_->leave(Deadline::after(timeout())); });
}

void ThreadHosts::end_thread() {
  if (!thread_.joinable()) return;
  ending_ = true;
  engine_.wake_up();
  thread_.join();
}

// ---- The thread's side ----

void ThreadHosts::run() {
  try {
    serve();
  } catch (...) {
    failure_.set(std::current_exception());
    engine_.announce_abort(std::current_exception());
  }
}

void ThreadHosts::serve() {
  int spins = 0;
  Clock::time_point next_look{};
  const int most_spins = engine_.oversubscribed() ? 0 : kSpins;
  while (!ending_) {
    if (has_orders()) take_orders();
    if (engine_.advance()) {
      publish();
      spins = 0;
      continue;
    }
    if (!engine_.idle() && ++spins <= most_spins) continue;
    const auto now = Clock::now();
    if (!engine_.idle() && now >= next_look) {
      engine_.check_peers();
      publish();
      next_look = now + kThreadNap;
      const auto count = now.time_since_epoch().count();
      if (count >= wait_end_.load(std::memory_order_acquire) && !engine_.idle())
        engine_.time_out(
            std::chrono::duration<double>(Clock::duration(count - wait_begin_.load(std::memory_order_relaxed)))
                .count());
      engine_.mention_stall();
    }
    const auto end = Clock::time_point(Clock::duration(wait_end_.load(std::memory_order_acquire)));
    Clock::duration nap = engine_.idle() ? Clock::duration(kLongNap) : Clock::duration(kThreadNap);
    if (!engine_.idle() && end < now + nap) nap = std::max<Clock::duration>(end - now, std::chrono::milliseconds(1));
    engine_.sleep(nap, [&] { return has_orders(); });
    publish();
    spins = most_spins / 2;
  }
}

void ThreadHosts::take_orders() {
  {
    const std::lock_guard lock(mutex_);
    issued_.swap(taken_);
    taken_count_ += taken_.size();
  }
  for (const HostEngine::Order& order : taken_) engine_.submit(order);
  taken_.clear();
}

void ThreadHosts::publish() {
  completed_sequence_.store(engine_.completed_sequence(), std::memory_order_release);
  completed_.store(engine_.completed(), std::memory_order_release);
}

}  // namespace lockstep::comm
