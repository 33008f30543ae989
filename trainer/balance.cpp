#include "trainer/balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/sampler/slice.h"

namespace lockstep::trainer {
namespace {

constexpr double kLeastNs = 0.5e9;  // of steps that are looked at together: a scheduler's turns are milliseconds
constexpr double kMostNs = 64 * kLeastNs;
constexpr double kLeastGain = 0.05;    // of a step
constexpr double kFirstCostSteps = 3;  // that a change is taken to cost, before there was one
constexpr double kSlack = 1.02;        // of the best time, for fewer partial sums
constexpr std::size_t kMostLeavesToChoose = 1024;

/// The most parts with which a rank is done by `time`.
std::uint32_t parts_within(double time, const RankSpeed& rank, std::uint32_t most) {
  const double turns = std::floor(time / rank.turn * (1 + 1e-12));
  return static_cast<std::uint32_t>(std::min<double>(most, turns * rank.at_once));
}

}  // namespace

BalanceSetting parse_balance(const std::string& text) {
  if (text == "none") return {};
  if (text == "auto") return {.automatic = true};
  constexpr std::string_view kSpeeds{"speeds:"};
  BalanceSetting made;
  if (text.starts_with(kSpeeds))
    for (const auto& word : split(text.substr(kSpeeds.size()), ',')) {
      const auto speed = parse_double(word);
      if (!speed || !(*speed > 0) || *speed > 1e6) {
        made.speeds.clear();
        break;
      }
      made.speeds.push_back(*speed);
    }
  if (made.speeds.empty())
    throw UsageError(fmt::format("the balance '{}'", text),
                     "give auto, or how fast each rank is beside the others, above 0: speeds:2,1,1");
  return made;
}

double RankSpeed::time_of(std::uint32_t parts) const {
  const auto width = static_cast<std::uint32_t>(at_once);
  const std::uint32_t turns = (parts + width - 1) / width;
  return turn * static_cast<double>(turns);
}

double time_of(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks) {
  double longest = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) longest = std::max(longest, ranks[r].time_of(shares[r]));
  return longest;
}

double time_in_turns(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks) {
  double longest = 0;
  std::uint32_t begin = 0;
  for (std::size_t run = 0; run < ranks.size(); begin += shares[run++]) {
    const auto width = static_cast<std::uint32_t>(ranks[run].at_once), end = begin + shares[run];
    const std::uint32_t turns = (end - 1) / width - begin / width + 1;
    longest = std::max(longest, ranks[run].turn * static_cast<double>(turns));
  }
  return longest;
}

// One part after the other to the rank that is done with it first. It begins with what a rank does in the time that all
// parts but one for each rank would take together if they could be cut: less than it has in the best shares.
std::vector<std::uint32_t> share_out(std::uint32_t parts, std::span<const RankSpeed> ranks) {
  double rate = 0;
  for (const auto& rank : ranks) rate += rank.at_once / rank.turn;
  const auto spare = parts - static_cast<std::uint32_t>(ranks.size());
  std::vector<std::uint32_t> shares;
  for (const auto& rank : ranks)
    shares.push_back(std::max<std::uint32_t>(1, parts_within(0.999999 * spare / rate, rank, parts)));
  auto given = std::accumulate(shares.begin(), shares.end(), std::uint64_t{0});
  for (; given < parts; ++given) {
    std::size_t first = 0;
    for (std::size_t r = 1; r < ranks.size(); ++r)
      if (ranks[r].time_of(shares[r] + 1) < ranks[first].time_of(shares[first] + 1)) first = r;
    ++shares[first];
  }
  return shares;
}

// By the least number of partial sums up to each leaf, run by run.
std::vector<std::uint32_t> share_out(const comm::ReductionTree& tree, std::span<const RankSpeed> ranks) {
  const auto leaves = static_cast<std::uint32_t>(tree.leaves());
  std::vector<std::uint32_t> best = share_out(leaves, ranks);
  if (leaves > kMostLeavesToChoose) return best;
  const double time = kSlack * time_of(best, ranks);
  constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> least(leaves + 1, kNone);
  std::vector<std::vector<std::uint32_t>> from;  // by run, then by the leaf where it ends: its length
  least[0] = 0;
  for (const auto& rank : ranks) {
    std::vector<std::uint32_t> next(leaves + 1, kNone);
    auto& length_to = from.emplace_back(leaves + 1, 0u);
    for (std::uint32_t begin = 0; begin < leaves; ++begin) {
      if (least[begin] == kNone) continue;
      const std::uint32_t most = parts_within(time, rank, leaves - begin);
      for (std::uint32_t length = 1; length <= most; ++length) {
        const std::uint32_t end = begin + length;
        const auto sums = least[begin] + static_cast<std::uint32_t>(tree.nodes_within(begin, end).size());
        if (sums >= next[end]) continue;
        next[end] = sums;
        length_to[end] = length;
      }
    }
    least = std::move(next);
  }
  LOCKSTEP_ASSERT(least[leaves] != kNone, "no shares of {} shards are as good as the best", leaves);
  std::vector<std::uint32_t> fewest(ranks.size());
  std::uint32_t end = leaves;
  for (std::size_t run = ranks.size(); run > 0; --run) {
    fewest[run - 1] = from[run - 1][end];
    end -= fewest[run - 1];
  }
  return time_in_turns(fewest, ranks) <= kSlack * time_in_turns(best, ranks) ? fewest : best;
}

Balance::Balance(std::uint32_t parts, std::vector<int> at_once, const comm::ReductionTree* tree)
    : parts_(parts), at_once_(std::move(at_once)), tree_(tree), look_ns_(kLeastNs) {
  for (std::size_t rank = 0; rank < at_once_.size(); ++rank)
    shares_.push_back(tree_ != nullptr
                          ? tree_->run_of(static_cast<int>(rank)).count
                          : static_cast<std::uint32_t>(sampler::slice_of(parts, rank, at_once_.size()).count));
}

std::vector<std::uint32_t> Balance::share_out_by_rank(std::span<const RankSpeed> ranks) const {
  if (tree_ == nullptr) return share_out(parts_, ranks);
  const auto shares = share_out(*tree_, in_runs(*tree_, ranks));
  std::vector<std::uint32_t> made(shares.size());
  for (std::size_t run = 0; run < shares.size(); ++run)
    made[static_cast<std::size_t>(tree_->order()[run])] = shares[run];
  return made;
}

// That a rank needs now.
double Balance::turns_of(int rank) const {
  std::vector<RankSpeed> ranks(shares_.size(), {.turn = 0});
  const auto own = static_cast<std::size_t>(rank);
  ranks[own] = {.turn = 1, .at_once = at_once_[own]};
  return time_by_rank(shares_, ranks);
}

double Balance::time_by_rank(std::span<const std::uint32_t> shares, std::span<const RankSpeed> ranks) const {
  if (tree_ == nullptr) return time_of(shares, ranks);
  return time_in_turns(in_runs(*tree_, shares), in_runs(*tree_, ranks));
}

BalanceReport Balance::take_speeds(std::span<const double> speeds) {
  std::vector<RankSpeed> ranks;
  for (const double speed : speeds) ranks.push_back({.turn = 1 / speed});
  shares_ = share_out_by_rank(ranks);
  return {.shares = shares_};
}

std::optional<BalanceReport> Balance::follow(std::span<const StepTimes> window, std::int64_t step,
                                             std::int64_t steps_left) {
  seen_.resize(window.size());
  for (std::size_t r = 0; r < window.size(); ++r) {
    seen_[r].steps += window[r].steps;
    seen_[r].data_ns += window[r].data_ns;
    seen_[r].compute_ns += window[r].compute_ns;
    seen_[r].wait_ns += window[r].wait_ns;
  }
  const auto own_ns = [](const StepTimes& times) { return times.data_ns + times.compute_ns; };
  if (own_ns(seen_.front()) + seen_.front().wait_ns < look_ns_) return std::nullopt;
  const auto seen = std::exchange(seen_, {});
  std::vector<RankSpeed> ranks;
  BalanceReport report{.step = step};
  double now = 0;
  for (std::size_t r = 0; r < seen.size(); ++r) {
    const double own = own_ns(seen[r]) / std::max(1.0, seen[r].steps);
    if (!(own > 0)) return std::nullopt;
    now = std::max(now, own);
    report.own_ms.push_back(1e-6 * own);
    const double turn = own / turns_of(static_cast<int>(r));
    if (turns_.size() <= r) turns_.push_back(turn);
    turns_[r] = (turns_[r] + turn) / 2;
    ranks.push_back({.turn = turns_[r], .at_once = at_once_[r]});
  }
  const double known = time_by_rank(shares_, ranks);
  // Looking for few partial sums takes longer than looking whether there is anything to gain.
  report.shares =
      time_of(share_out(parts_, ranks), ranks) > (1 - kLeastGain) * known ? shares_ : share_out_by_rank(ranks);
  const double then = time_by_rank(report.shares, ranks), gain = known - then;
  const bool asks = report.shares != shares_ && gain >= kLeastGain * known;
  if (const auto change = std::exchange(judged_, std::nullopt);
      change && now > 0.5 * (change->before_ns + change->expected_ns))
    look_ns_ = std::min(2 * look_ns_, kMostNs);
  else if (!asks)
    look_ns_ = std::max(look_ns_ / 2, kLeastNs);
  if (!asks) return std::nullopt;
  if (gain * static_cast<double>(steps_left) <= cost_ns_.value_or(kFirstCostSteps * now)) return std::nullopt;
  judged_ = {.before_ns = now, .expected_ns = now - gain};
  shares_ = report.shares;
  report.expected_ms = 1e-6 * then;
  return report;
}

}  // namespace lockstep::trainer
