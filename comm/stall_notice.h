// What a rank says while it waits for others, and when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace lockstep::comm {

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

/// "rank 1 (host b); rank 2 (host b); 5 more": the first few.
std::string first_names(const std::vector<std::string>& names);

}  // namespace lockstep::comm
