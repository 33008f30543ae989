// Ranks that outlive others: what they have said, and whether the job can continue with them. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status_report.h"
#include "launcher/root_cause.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Note [Survivors]
/// With --in-place a job is restarted rank by rank. A rank whose program can do without others for a while says so
/// (StatusReport::kRejoins). When it loses one it does not end: it says kStranded and keeps its process, and with it
/// memory, data and kernels. When every rank has ended or is stranded, the launcher starts ranks in the lost ones'
/// places, and gives each stranded one the environment that it would be started with now: another port for the
/// rendezvous, another attempt. They connect there, and those that have got furthest give the others their state.
///
/// On one host a spare, a process that waits for such an environment from its beginning, takes the first lost one's
/// place at once. The launcher starts another one when the job has made a step again.
///
/// All ranks are ended, and the job is restarted from its newest checkpoint as Note [Restarts] has it, where
///   - a program does not say that it can,
///   - the failure would repeat, or somebody has asked a rank to end,
///   - a host is lost: there are fewer ranks then,
///   - no rank that is left has a state to give,
///   - ranks were replaced kMostTries times without a step between: what keeps new ones from joining does not go away.
/// One that neither ends nor strands in patience() is ended, and replaced too; where none has ended, in a second: the
/// others have waited for it in vain. If all are stranded, they connect again.

/// Not thread-safe.
class Survivors {
 public:
  explicit Survivors(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  void add(int rank, const StatusReport& report);
  /// Whether `step` is the first one since ranks were replaced; add() has not seen it.
  bool is_first(std::int64_t step) const { return tries_ > 0 && step > from_; }
  /// Whether all programs can, and there is a try left.
  bool may_rejoin() const;
  /// From the first failure until all have ended or are stranded: some may be in the middle of a long step, but not
  /// while they connect.
  Clock::duration patience() const { return tries_ > 0 ? kConnectingFails : kStepTakes; }

  enum class Outlook { kWaits, kReady, kHopeless };
  /// `reports` by rank.
  Outlook outlook(std::span<const RankReport> reports) const;
  /// The last step of which a rank that is left has the state; -1: none.
  std::int64_t step(std::span<const RankReport> reports) const;
  bool is_stranded(int rank) const { return ranks_[static_cast<std::size_t>(rank)].stranded_after.has_value(); }
  /// Others take the places of `lost`, of the same program, and the job continues after `step`.
  void replace(const std::vector<int>& lost, std::int64_t step);

 private:
  static constexpr int kMostTries = 3;
  static constexpr Clock::duration kStepTakes = std::chrono::seconds(60), kConnectingFails = std::chrono::seconds(3);
  struct One {
    bool rejoins = false;
    bool has_state = false;
    std::optional<std::int64_t> stranded_after = {};
  };
  std::vector<One> ranks_;
  int tries_ = 0;           // since the last step
  std::int64_t from_ = -1;  // the step after which ranks were replaced
};

/// Ranks that others have outlived.
struct Loss {
  const RootCause& cause;
  std::vector<int> ranks;
  std::vector<int> to_start;     // of these, those whose places no spare takes
  std::int64_t step = 0;         // after which the job continues
  Clock::time_point since = {};  // when the first of them failed
};

/// What the launcher starts in their places.
struct Replacements {
  std::vector<std::pair<int, int>> wrappers;             // rank and process of those on this host
  std::vector<std::pair<int, std::size_t>> remote = {};  // rank and host of those on others
  std::vector<Place> places = {};                        // of all ranks
};

}  // namespace lockstep::launcher
