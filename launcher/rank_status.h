// What the ranks say they are doing, and how long that lets them live after a stop request. Pure.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status_report.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// "rank 2", "ranks 2 and 3", "ranks 2 to 5", "ranks 0, 2 and 5"; `ranks` in order, at least one.
std::string ranks_text(const std::vector<int>& ranks);

/// Not thread-safe.
class RankStatus {
 public:
  /// Of ranks that have nothing to save, and of those that have; before `--grace-seconds` says otherwise.
  static constexpr double kGraceSeconds = 1;
  static constexpr double kSavingGraceSeconds = 30;

  /// `grace_seconds`: as the user has chosen, for all ranks.
  RankStatus(int ranks, std::optional<double> grace_seconds);

  void add(int rank, const StatusReport& report);
  /// Others take the places of `lost`: what was said of waiting is of the past.
  void replace(const std::vector<int>& lost);
  /// The rank's program has ended.
  void remove(int rank);

  /// How long ranks have from a request to stop until they are killed. `requested`: the job was asked to stop, so ranks
  /// finish their step; else one of them has failed, and only what is being written is worth a wait. A stop that comes
  /// within a step is noticed in the next one, so it takes up to two.
  Clock::duration grace(bool requested) const;
  /// "rank 0 to write the checkpoint of step 12"; empty if nothing would be lost by killing them.
  std::string waited_for(bool requested) const;
  /// The signal that has stopped the rank's program; 0 while it runs. It stays where another rank had waited for this
  /// one in vain before it was resumed.
  int stopped_by(int rank) const { return of(rank).stopped_by; }
  /// For whom this rank has waited in vain, as it says itself.
  const std::vector<int>& missing(int rank) const { return of(rank).missing; }
  bool had_usage_error(int rank) const { return of(rank).had_usage_error; }
  /// Whether no other rank has reported the same usage error before.
  bool is_new_usage_error(const std::string& text) { return usage_errors_.insert(text).second; }

 private:
  struct One {
    bool defers_stops = false;
    double step_seconds = 0;
    std::string saving;
    int stopped_by = 0;
    std::vector<int> missing;
    bool had_usage_error = false;
  };
  const One& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  bool anyone_saves(bool requested) const;
  bool was_waited_for(int rank) const;

  std::vector<One> ranks_;
  std::optional<double> grace_seconds_;
  std::set<std::string> usage_errors_;
};

}  // namespace lockstep::launcher
