// How a step is shared out, from numbers alone: against all ways to do it, and against ranks whose speeds change.
#include "trainer/balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/splitmix.h"
#include "tests/support/refusal.h"

namespace lockstep::trainer {
namespace {

using ::testing::ElementsAre;

using Shares = std::vector<std::uint32_t>;

comm::ReductionTree tree_of(std::size_t leaves, std::size_t ranks) {
  std::vector<int> positions(ranks);
  std::iota(positions.begin(), positions.end(), 0);
  return {leaves, positions};
}

std::vector<RankSpeed> drawn(std::size_t ranks, std::uint64_t seed, int most_at_once) {
  std::vector<RankSpeed> made;
  for (std::size_t r = 0; r < ranks; ++r)
    made.push_back(
        {.turn = 1 + static_cast<double>(SplitMix64::word(seed, r) % 90) / 10,
         .at_once = 1 + static_cast<int>(SplitMix64::word(seed, 100 + r) % static_cast<unsigned>(most_at_once))});
  return made;
}

/// All shares of `parts` for so many ranks.
void each_way(std::uint32_t parts, std::size_t ranks, Shares& shares, const std::function<void(const Shares&)>& use) {
  if (shares.size() + 1 == ranks) {
    shares.push_back(parts);
    use(shares);
    shares.pop_back();
    return;
  }
  for (std::uint32_t own = 1; own + (ranks - shares.size() - 1) <= parts; ++own) {
    shares.push_back(own);
    each_way(parts - own, ranks, shares, use);
    shares.pop_back();
  }
}

std::size_t partial_sums(const comm::ReductionTree& tree, const Shares& shares) {
  std::size_t sums = 0;
  std::uint32_t begin = 0;
  for (const std::uint32_t own : shares) {
    sums += tree.nodes_within(begin, begin + own).size();
    begin += own;
  }
  return sums;
}

TEST(ShareOut, NoOtherWayIsDoneEarlierOrHasFewerPartialSums) {
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    for (const auto& [parts, ranks] : {std::pair{7u, 2ul}, {8u, 3ul}, {16u, 2ul}, {13u, 4ul}, {4u, 4ul}, {5u, 1ul}}) {
      const auto speeds = drawn(ranks, seed, seed % 2 == 0 ? 1 : 3);
      SCOPED_TRACE(fmt::format("seed {}, {} parts, {} ranks", seed, parts, ranks));
      double best = 1e9;
      Shares shares;
      each_way(parts, ranks, shares, [&](const Shares& way) { best = std::min(best, time_of(way, speeds)); });
      const Shares made = share_out(parts, speeds);
      EXPECT_EQ(std::accumulate(made.begin(), made.end(), 0u), parts);
      EXPECT_DOUBLE_EQ(time_of(made, speeds), best);

      const auto tree = tree_of(parts, ranks);
      std::size_t fewest = 1000;
      each_way(parts, ranks, shares, [&](const Shares& way) {
        if (time_of(way, speeds) <= 1.02 * best) fewest = std::min(fewest, partial_sums(tree, way));
      });
      const Shares along = share_out(tree, speeds);
      EXPECT_EQ(std::accumulate(along.begin(), along.end(), 0u), parts);
      EXPECT_LE(time_in_turns(along, speeds), 1.02 * time_in_turns(made, speeds));
      if (seed % 2 == 1) continue;  // turns of several shards may be more for where they begin
      EXPECT_LE(time_of(along, speeds), 1.02 * best);
      EXPECT_EQ(partial_sums(tree, along), fewest);
    }
}

TEST(ShareOut, ManySamplesGoByTheSpeeds) {
  const std::vector<RankSpeed> speeds = {{.turn = 1}, {.turn = 2}, {.turn = 1.0 / 3}};
  const Shares shares = share_out(9'000'000, speeds);
  EXPECT_THAT(shares, ElementsAre(2'000'000, 1'000'000, 6'000'000));
  const std::vector<RankSpeed> far = {{.turn = 1e-9}, {.turn = 1e9}};
  EXPECT_THAT(share_out(4'096, far), ElementsAre(4'095, 1));
  EXPECT_THAT(share_out(tree_of(65'536, 2), far), ElementsAre(65'535, 1));
}

TEST(ParseBalance, TakesWhatIsADecision) {
  EXPECT_FALSE(parse_balance("none").on());
  EXPECT_TRUE(parse_balance("auto").automatic);
  EXPECT_THAT(parse_balance("speeds:2,1,0.5").speeds, ElementsAre(2, 1, 0.5));
  for (const char* text : {"", "speeds", "speeds:", "speeds:1,", "speeds:1,-1", "speeds:inf", "Auto", "2,1"})
    EXPECT_REFUSED("the balance", parse_balance(text));
}

/// What ranks take for a part, in ms, and for what does not depend on parts.
std::vector<StepTimes> window_of(const Shares& shares, const std::vector<double>& part_ms, double fixed_ms,
                                 double steps = 20) {
  std::vector<StepTimes> window;
  double longest = 0;
  for (std::size_t r = 0; r < shares.size(); ++r) longest = std::max(longest, part_ms[r] * shares[r] + fixed_ms);
  for (std::size_t r = 0; r < shares.size(); ++r) {
    const double own = part_ms[r] * shares[r] + fixed_ms;
    window.push_back({.steps = steps, .compute_ns = 1e6 * steps * own, .wait_ns = 1e6 * steps * (longest - own)});
  }
  return window;
}

double longest_of(const Shares& shares, const std::vector<double>& part_ms) {
  double longest = 0;
  for (std::size_t r = 0; r < shares.size(); ++r) longest = std::max(longest, part_ms[r] * shares[r]);
  return longest;
}

TEST(Balance, FindsTheBestSharesInAFewWindowsAndKeepsThem) {
  for (const auto& part_ms : {std::vector<double>{10, 20}, {10, 15, 30}, {10, 10, 10}, {31, 10, 10, 10}}) {
    const std::size_t ranks = part_ms.size();
    const auto tree = tree_of(8 * ranks, ranks);
    Balance balance(static_cast<std::uint32_t>(8 * ranks), std::vector<int>(ranks, 1), &tree);
    int changes = 0, last = 0;
    for (int window = 1; window <= 40; ++window)
      if (balance.follow(window_of(balance.shares(), part_ms, 5), 20 * window, 10'000)) {
        ++changes;
        last = window;
      }
    std::vector<RankSpeed> speeds;
    for (const double ms : part_ms) speeds.push_back({.turn = ms});
    EXPECT_LE(longest_of(balance.shares(), part_ms), 1.07 * time_of(share_out(tree, speeds), speeds));
    EXPECT_LE(changes, 4);
    EXPECT_LE(last, 8);
  }
}

// A rank that is slowed in mid-run, and is as fast as before later on.
TEST(Balance, FollowsARankThatChanges) {
  Balance balance(96, {1, 1}, nullptr);
  int step = 0;
  const auto run = [&](const std::vector<double>& part_ms, int windows) {
    for (int i = 0; i < windows; ++i) balance.follow(window_of(balance.shares(), part_ms, 0), step += 20, 10'000);
    return balance.shares();
  };
  EXPECT_THAT(run({1, 1}, 10), ElementsAre(48, 48));
  EXPECT_NEAR(run({1, 3}, 12)[0], 72, 3);
  EXPECT_NEAR(run({1, 1}, 12)[0], 48, 3);
}

TEST(Balance, AChangeHasToPayForItself) {
  Balance balance(16, {1, 1}, nullptr);
  const std::vector<double> part_ms = {10, 20};
  EXPECT_FALSE(balance.follow(window_of(balance.shares(), part_ms, 0), 20, 5)) << "5 steps are left";
  ASSERT_TRUE(balance.follow(window_of(balance.shares(), part_ms, 0), 40, 1000));
  balance.change_took(3600);
  EXPECT_FALSE(balance.follow(window_of(balance.shares(), {20, 10}, 0), 60, 1000)) << "it took an hour";
  EXPECT_TRUE(balance.follow(window_of(balance.shares(), {20, 10}, 0), 80, 1'000'000'000));
}

// Steps of 2 ms say little: a scheduler's turns are longer.
TEST(Balance, LooksLongEnough) {
  Balance balance(16, {1, 1}, nullptr);
  int windows = 0;
  while (!balance.follow(window_of(balance.shares(), {0.1, 0.2}, 0), 20, 1'000'000)) ASSERT_LT(++windows, 100);
  EXPECT_GE(windows, 14);
}

// On one processor for both, whoever has less to do lets the other have it: times say that the one with more parts is
// slow, whichever that is.
TEST(Balance, StopsWhereChangesBringNothing) {
  Balance balance(16, {1, 1}, nullptr);
  int early = 0, late = 0;
  for (int window = 0; window < 400; ++window) {
    const double more = balance.shares()[0] >= balance.shares()[1] ? 1.3 : 0.77;
    if (balance.follow(window_of(balance.shares(), {10 * more, 10}, 0), 20, 1'000'000)) ++(window < 200 ? early : late);
  }
  EXPECT_LE(early, 20);
  EXPECT_LE(late, 10);
}

TEST(Balance, ShardsAtOnceCount) {
  // Four cores beside one, for shards of one thread each.
  const auto tree = tree_of(20, 2);
  Balance balance(20, {4, 1}, &tree);
  for (int window = 0; window < 10; ++window) {
    std::vector<StepTimes> times;
    for (const auto& [share, at_once] : {std::pair{balance.shares()[0], 4u}, {balance.shares()[1], 1u}}) {
      const std::uint32_t turns = (share + at_once - 1) / at_once;
      times.push_back({.steps = 20, .compute_ns = 20e6 * 10 * static_cast<double>(turns)});
    }
    balance.follow(times, 20, 10'000);
  }
  EXPECT_THAT(balance.shares(), ElementsAre(16, 4));
}

}  // namespace
}  // namespace lockstep::trainer
