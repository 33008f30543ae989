#include "comm/hosts/inline_hosts.h"

#include <sched.h>

#include <algorithm>

#include "base/error.h"
#include "base/stop.h"

namespace lockstep::comm {
namespace {

// Looks before a wait sleeps: at sockets (a system call each), or at memory alone.
constexpr int kSpinsOverSockets = 50;
constexpr int kSpinsOverMemory = 2000;
// Where ranks outnumber cores: how often a wait lets another process have the core before it sleeps.
constexpr int kYields = 20;
// The longest sleep, and the time between two looks at deadline, stop requests and the other processes.
constexpr auto kNap = std::chrono::milliseconds(20);
// The time between two looks at the other processes by a caller that only polls.
constexpr auto kLookEvery = std::chrono::milliseconds(100);

void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

template <class Action>
auto InlineHosts::guard(Action&& action) {
  failure_.throw_if_any();
  try {
    return action();
  } catch (...) {
    failure_.set(std::current_exception());
    engine_.announce_abort(std::current_exception());
    throw;
  }
}

std::uint64_t InlineHosts::hand_over(const HostEngine::Order& order) {
  return guard([&] {
    engine_.submit(order);
    engine_.advance();
    return engine_.submitted();
  });
}

void InlineHosts::poll() {
  guard([&] {
    if (!engine_.advance()) check_peers_now_and_then();
  });
}

bool InlineHosts::is_done(std::uint64_t sequence) {
  return guard([&] {
    if (engine_.completed_sequence() < sequence && !engine_.advance()) check_peers_now_and_then();
    return engine_.completed_sequence() >= sequence;
  });
}

void InlineHosts::wait_done(std::uint64_t sequence, Deadline deadline) {
  guard([&] { wait_until([&] { return engine_.completed_sequence() >= sequence; }, deadline); });
}

void InlineHosts::wait_for_index(std::uint64_t index, Deadline deadline) {
  guard([&] { wait_until([&] { return engine_.completed() >= index; }, deadline); });
}

template <class Condition>
void InlineHosts::wait_until(Condition&& done, Deadline deadline) {
  const bool yields = engine_.oversubscribed();
  const int most_spins = yields ? kYields : engine_.drives() ? kSpinsOverSockets : kSpinsOverMemory;
  Clock::time_point begin{}, next_look{};  // known from the first sleep on: a short wait reads no clock
  int spins = 0;
  while (!done()) {
    if (engine_.advance()) {
      spins = 0;
      continue;
    }
    if (++spins <= most_spins) {
      if (yields)
        ::sched_yield();
      else
        relax_cpu();
      continue;
    }
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (now >= next_look) {
      throw_if_stopped("waiting for the other ranks");
      engine_.check_peers();
      if (deadline.expired() && !done()) engine_.time_out(seconds_between(begin, now));
      engine_.mention_stall();
      next_look = now + kNap;
    }
    engine_.sleep(std::min<Clock::duration>(kNap, deadline.remaining() + std::chrono::milliseconds(1)), done);
    spins = most_spins / 2;
  }
}

void InlineHosts::check_peers_now_and_then() {
  // Of ranks that have all been asked to stop the first to end is no surprise: the next wait says that it is one.
  if (engine_.idle() || stop_signal() != 0) return;
  const auto now = Clock::now();
  if (now < next_look_) return;
  engine_.check_peers();
  next_look_ = now + kLookEvery;
}

void InlineHosts::watch_peers() {
  guard([&] {
    if (engine_.advance() || stop_signal() != 0) return;
    const auto now = Clock::now();
    if (now < next_look_) return;
    next_look_ = now + kLookEvery;
    engine_.check_peers();
    engine_.check_ended_peers();
  });
}

void InlineHosts::shutdown() {
  barrier().wait_host();
  guard([&] { store_->leave(Deadline::after(timeout())); });
}

}  // namespace lockstep::comm
