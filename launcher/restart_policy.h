// Whether a job that has failed is started again: from what its ranks have reported, never from a program's files.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// What the ranks have reported of their work in one attempt.
struct JobProgress {
  std::optional<std::int64_t> step = {};        // the furthest that is complete
  std::optional<std::int64_t> checkpoint = {};  // the newest complete one: the step after which it was taken
  Clock::time_point checkpointed_at = {};       // when that was reported
  bool done = false;                            // the work is complete
};

/// An attempt that has ended, with the launcher's exit code for it.
struct AttemptEnd {
  int exit_code = 0;
  bool requested = false;  // somebody wants the job to end
  JobProgress progress;
  int ranks = 0;         // that it had; 0: as many as the policy allowed
  bool growing = false;  // the ranks were asked to end, so that the job continues with more
  /// The next attempt has other hosts, or one again that was lost: reason enough to try again without progress.
  bool hosts_change = false;
};

struct RestartDecision {
  bool restart = false;
  std::string why_not;  // one line for people; empty where there is nothing to say
  int ranks = 0;        // of the next attempt, at most
  Clock::duration pause = {};
  std::int64_t from_step = 0;   // the newest checkpoint's, of any attempt; 0: the start
  std::int64_t lost_steps = 0;  // complete ones after it
};

/// Why a failure with this code would repeat, or was wanted; empty where neither is known.
std::string permanence_of(int exit_code);

/// Note [Restarts]
/// A job is restarted after a failure that may not repeat: a rank was killed or crashed, a host was lost, a timeout. It
/// is not restarted after a failure that would repeat (wrong usage, bad data, an unusable checkpoint, divergence, a
/// program that cannot be started), nor after a wanted end (a signal, exit code 75, finished work).
///
/// Progress is a step further than any before, or a newer checkpoint. After an attempt without either, the job is not
/// restarted with as many ranks: it would fail for ever. One that has continued with other ranks (Note [Survivors]) and
/// then got no further is: from the checkpoint it may. Between failures in a row without a newer checkpoint there are
/// pauses: kFirstPause, doubled each time, up to kLongestPause. From the second such failure on, the job resumes with
/// one rank fewer, if `min_ranks` allows that: hosts that cannot run as many ranks may run fewer. These ranks do not
/// come back, because the hosts would fail again. The ranks of a lost host come back with the host.
class RestartPolicy {
 public:
  static constexpr auto kFirstPause = std::chrono::milliseconds(250);
  static constexpr auto kLongestPause = std::chrono::seconds(60);

  /// `min_ranks` ≤ `ranks`.
  RestartPolicy(int max_restarts, int ranks, int min_ranks)
      : max_restarts_(max_restarts), ranks_(ranks), min_ranks_(min_ranks) {}

  RestartDecision plan_after(const AttemptEnd& end);
  /// Whether the job may continue without an end after `step`, with other ranks in the place of some (Note
  /// [Survivors]): it counts as a restart then.
  bool continue_after(std::int64_t step);
  /// Whether an attempt has got further than all before that have ended.
  bool is_progress(const JobProgress& progress) const;
  /// The number of the attempt that runs, from 0.
  int attempt() const { return attempt_; }
  /// After failures, so far.
  int restarts() const { return restarts_; }
  int max_restarts() const { return max_restarts_; }
  /// How many ranks an attempt may have, and must have.
  int ranks() const { return ranks_; }
  int min_ranks() const { return min_ranks_; }
  /// The newest checkpoint's, of any attempt that has ended; 0: there is none.
  std::int64_t newest_checkpoint() const { return newest_checkpoint_.value_or(0); }

 private:
  int max_restarts_;
  int ranks_;
  int min_ranks_;
  int attempt_ = 0, restarts_ = 0;
  int failures_without_checkpoint_ = 0;  // in a row
  bool continued_ = false;               // since the last attempt has ended
  std::optional<std::int64_t> furthest_step_, newest_checkpoint_;
};

}  // namespace lockstep::launcher
