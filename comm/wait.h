// Waits for other processes: how they spend their time, and when they end.
#pragma once

#include <sched.h>

#include "base/signals.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// How a wait spends its time.
struct WaitPolicy {
  int spins = 0;        // first, so many looks with nothing but a pause of the CPU
  int pause_every = 1;  // between so many of them,
  int yields = 0;       // then so many between which another process may have the core; then it sleeps,
  int recovered = 0;    // and after each sleep, so many of these looks are repeated
  Clock::duration check_every = std::chrono::milliseconds(20);  // between two checks, while it sleeps
  const char* doing = "waiting for the other ranks";            // what a stop request ends; nullptr: it ends nothing
};

inline void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// What all waits in this process's own time are made of. Looks until done(), or until `deadline`: then false.
/// advance() does what can be done now, and says whether anything was. Where nothing is, the wait spins, yields and
/// sleeps as `policy` says; before it sleeps it looks, each check_every, at stop requests and calls check(waited),
/// which throws what ends the wait. sleep(idle) sleeps until something may have changed, but no longer than checks may
/// be apart; `idle` is for how long nothing has happened. A short wait reads no clock.
template <class Done, class Advance, class Check, class Sleep>
bool wait_until(const WaitPolicy& policy, Deadline deadline, Done&& done, Advance&& advance, Check&& check,
                Sleep&& sleep) {
  const int looks_at_once = policy.spins + policy.yields;
  Clock::time_point begin{}, idle_since{}, next_check{};
  int looks = 0;
  while (!done()) {
    if (advance()) {
      looks = 0;
      idle_since = {};
      continue;
    }
    if (++looks <= policy.spins) {
      if (looks % policy.pause_every == 0) relax_cpu();
      continue;
    }
    if (looks <= looks_at_once) {
      ::sched_yield();
      continue;
    }
    const auto now = Clock::now();
    if (begin == Clock::time_point{}) begin = now;
    if (idle_since == Clock::time_point{}) idle_since = now;
    if (now >= next_check) {
      if (policy.doing != nullptr) throw_if_stopped(policy.doing);
      check(now - begin);
      if (deadline.expired()) return done();
      next_check = now + policy.check_every;
    }
    sleep(now - idle_since);
    looks = looks_at_once - policy.recovered;
  }
  return true;
}

/// The sleep of those whom nobody wakes: lets other processes have the core at first, then sleeps for moments, so that
/// short waits end at once and long ones cost next to nothing.
void nap(Clock::duration idle);
/// For waits that nap: how often they look before. Not at all where there are more processes than cores: what is waited
/// for needs this one.
constexpr WaitPolicy nap_policy(bool oversubscribed) { return {.spins = oversubscribed ? 0 : 500, .pause_every = 8}; }

/// Before another rank's end is an error: whoever stops a job signals one rank after the other, and this one's turn may
/// be yet to come. Throws InterruptedError if it comes.
void await_own_stop_request();

}  // namespace lockstep::comm
