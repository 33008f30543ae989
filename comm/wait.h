// Waits for other processes: how they spend their time, when they end, and what a rank says meanwhile.
#pragma once

#include <sched.h>

#include <cstdint>
#include <string>
#include <vector>

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

/// How long a wait in which nothing moves lasts before it is mentioned; zero: it never is. Of this process
/// (--stall-warning-seconds), 10 s if nobody has set it.
void set_stall_warning(Clock::duration after);
Clock::duration stall_warning();

/// Note [Stall notices]
/// A rank that is stopped, hangs or computes something else is missed by all others, silently until their timeout. So
/// one rank of each host says it before: what waits, and for whom, when that has lasted stall_warning(), twice as long,
/// four times, and so on. Waits only look at the clock here; how they know whom they wait for is theirs.

/// When to say it, of the waits of one rank. Not thread-safe.
class StallNotice {
 public:
  /// To be called at every look of a wait, several times a second. `progress` is a number that changes when something
  /// moves. Whether the stall has become one to speak of, or to speak of again; not before `at_least`, which it takes
  /// to know who is waited for. A time without looks is this process's own doing (it computed, or was stopped), and
  /// does not count.
  bool is_due(std::uint64_t progress, Clock::time_point now, Clock::duration at_least = {});
  /// How long nothing has moved, and how often that has been due.
  double waited_seconds() const;
  unsigned times() const { return times_; }

 private:
  std::uint64_t progress_ = 0;
  Clock::time_point last_look_{};
  Clock::duration waited_{};
  Clock::duration next_{};
  unsigned times_ = 0;
};

/// Says that `what` ("allreduce #7 (…)") has waited so long for `whom` ("rank 1 (host b)").
void warn_of_stall(const std::string& what, double waited_seconds, const std::string& whom);

inline constexpr std::size_t kNamedRanks = 8;
/// "rank 1 (host b); rank 2 (host b); 5 more": the first kNamedRanks.
std::string first_names(const std::vector<std::string>& names);

}  // namespace lockstep::comm
