// Waits that last too long: who is missing, when one rank says so, and in which words.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Note [Stall notices]
/// A rank that is stopped, hangs or computes something else is missed by all others, silently until their timeout. So
/// one rank says it before: what waits, and for whom, when that has lasted stall_warning(), twice as long, four times,
/// and so on. StallDiagnosis decides when that is, whom it names, and what it says. A transport only reports how far
/// each rank has come (PeerState), and chooses the rank to speak: one of each host where they share memory, else the
/// lowest.

/// How long a wait in which nothing moves lasts before it is mentioned; zero: it never is. Of this process
/// (--stall-warning-seconds), 10 s if nobody has set it.
void set_stall_warning(Clock::duration after);
Clock::duration stall_warning();

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
/// "rank 1 (host b); rank 2 (host b); 5 more".
std::string first_names(const std::vector<std::string>& names, std::size_t most = kNamedRanks,
                        const char* separator = "; ");

/// How long an operation stands still before ranks report to each other that they wait in it: longer than a slow step,
/// and well inside the timeout.
constexpr Clock::duration patience_for(Clock::duration timeout) {
  return std::min<Clock::duration>(std::chrono::seconds(1), timeout / 3);
}

/// How far a rank has come in an operation, as far as is known here; from the least to the most suspect.
enum class PeerState : std::uint8_t {
  kDone,     // nothing is awaited of it
  kStarted,  // it has come to the operation, and its part is awaited
  kWaits,    // its part is awaited, and it has reported that it waits itself
  kQuiet,    // nothing is awaited of it here, and it has not reported that it waits
  kLate,     // its part is awaited, here or by another rank, and it has not reported that it waits
  kAbsent,   // it has not come to the operation
};

/// The most suspect ranks, in order; none if all are less suspect than `least`.
void find_suspects(std::span<const PeerState> states, PeerState least, std::vector<int>& suspects);

/// What a transport reports.
class StallReports {
 public:
  virtual ~StallReports() = default;
  /// Of each rank; all of `states` are kDone before. May ask the others, but waits for none.
  virtual void find_states(const Op& op, std::span<PeerState> states) = 0;
  /// "rank 1 (host b), the last that it issued is barrier #7", and its number in the job.
  virtual std::string suspect_text(int rank) const = 0;
  virtual int job_rank(int rank) const = 0;
  /// What an operation waits for if no rank is suspect; empty: it is about to end.
  virtual std::string other_cause() const { return {}; }
  /// Whether this rank is the one that says it, the `times`-th time.
  virtual bool speaks(const Op& op, unsigned times) = 0;
};

/// Watches the operations of one rank. Not thread-safe.
class StallDiagnosis {
 public:
  struct Patience {
    Clock::duration at_least = {};  // it takes the others so long to report that they wait
    Clock::duration confirms = {};  // a suspect is named if it is one still so much later
  };
  struct Suspects {
    std::vector<int> job_ranks;
    std::string names;
  };

  /// `reports`, of `size` ranks, outlives it.
  StallDiagnosis(StallReports& reports, int size, Patience patience);

  /// To be called at every look of a wait whose first operation is `op`; `moves` changes when something moves.
  void look(const Op& op, std::uint64_t moves, Clock::time_point now);
  /// Whom `op` waits for, now.
  Suspects suspects(const Op& op);

 private:
  void find(const Op& op, std::vector<int>& suspects);
  Suspects named(std::vector<int> ranks) const;

  StallReports& reports_;
  const Patience patience_;
  StallNotice notice_;
  std::vector<PeerState> states_;
  std::vector<int> suspects_, still_;
  std::optional<Clock::time_point> confirm_at_;
};

}  // namespace lockstep::comm
