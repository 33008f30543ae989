// How a step is shared out among ranks that are not equally fast.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/reduction_tree.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/stragglers.h"

namespace lockstep::trainer {

/// Note [Balance]
/// Ranks wait for each other in every step, so a step takes as long as the slowest of them. With --balance ranks have
/// different numbers of its parts: of its shards, or, without shards, of its samples. The sum over shards is one tree
/// whoever computes which of them, so the bits stay those of any other split; samples round otherwise.
///
/// At the end of each window of StragglerWatch every rank knows how long each of them has read and computed in a step.
/// Once windows are kLeastNs long together, all find the same shares from that. A rank that computes `at_once` parts at
/// a time needs ⌈parts / at_once⌉ turns; the time of one is the mean of this look's and of the one known before.
/// share_out() finds the shares whose slowest rank is done first. They are taken if the step gets shorter by
/// kLeastGain, and the steps that are left gain more than the change costs.
///
/// Where ranks share processors, one with less to do leaves the others more of them, and times follow the shares. So a
/// change with less than half of the expected gain doubles the time of a look; a look without a change halves it.

/// What --balance says.
struct BalanceSetting {
  bool automatic = false;
  std::vector<double> speeds = {};  // by rank, how fast they are relative to each other; empty: automatic, or none
  bool on() const { return automatic || !speeds.empty(); }
};
/// "none", "auto", "speeds:2,1,1". Throws UsageError for another text and speeds that are not above zero.
BalanceSetting parse_balance(const std::string& text);

struct RankSpeed {
  double turn = 1;  // time for a turn; any unit
  int at_once = 1;  // parts of a turn, at most
  double time_of(std::uint32_t parts) const;
};

/// `parts` for ranks in that order, of which each gets one or more: the slowest rank is done as early as it can be.
/// Pure; as many ranks as parts at most.
std::vector<std::uint32_t> share_out(std::uint32_t parts, std::span<const RankSpeed> ranks);
/// The same for ranks in the order of their runs of `tree`, over its leaves. Where several shares are within 2 % of the
/// best, one with the fewest partial sums, which all ranks add, and hosts send.
std::vector<std::uint32_t> share_out(const comm::ReductionTree& tree, std::span<const RankSpeed> ranks);
/// When the slowest rank is done.
double time_of(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks);
/// The same of shards, whose turns end at multiples of `at_once` (ddp: ShardSums), for ranks in the order of their
/// runs.
double time_in_turns(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks);

/// What there is for each rank, in the order of the runs.
template <class T>
std::vector<T> in_runs(const comm::ReductionTree& tree, std::span<const T> by_rank) {
  std::vector<T> by_run;
  for (const int rank : tree.order()) by_run.push_back(by_rank[static_cast<std::size_t>(rank)]);
  return by_run;
}

/// Decides. The same calls with the same arguments on all ranks; a tree outlives it.
class Balance {
 public:
  /// `at_once`, by rank: parts that it computes at a time. `tree`: equal runs of the `parts`, if they are shards; else
  /// nullptr.
  Balance(std::uint32_t parts, std::vector<int> at_once, const comm::ReductionTree* tree);

  /// Of now, by rank.
  const std::vector<std::uint32_t>& shares() const { return shares_; }
  /// Shares for speeds that are known.
  BalanceReport take_speeds(std::span<const double> speeds);
  /// After `step`, with which a window has ended. What is new; nothing: all stays.
  std::optional<BalanceReport> follow(std::span<const StepTimes> window, std::int64_t step, std::int64_t steps_left);
  /// How long the last change took, in seconds, on the rank where it took longest.
  void change_took(double seconds) { cost_ns_ = 1e9 * seconds; }

 private:
  std::vector<std::uint32_t> share_out_by_rank(std::span<const RankSpeed> ranks) const;
  double turns_of(int rank) const;
  double time_by_rank(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks) const;

  const std::uint32_t parts_;
  const std::vector<int> at_once_;
  const comm::ReductionTree* const tree_;
  std::vector<std::uint32_t> shares_;
  std::vector<StepTimes> seen_;  // since the last decision
  double look_ns_;               // that it has to be
  /// Of the last change, until it is known what it has brought.
  struct Change {
    double before_ns = 0, expected_ns = 0;
  };
  std::optional<Change> judged_;
  std::optional<double> cost_ns_;  // of a change; nothing: there was none
  std::vector<double> turns_;      // that are known, in ns by rank
};

}  // namespace lockstep::trainer
