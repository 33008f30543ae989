// Who holds the others up, and why, from numbers alone; and the watch among ranks.
#include "trainer/stragglers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/flight_record.h"
#include "tests/support/ranks.h"

namespace lockstep::trainer {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kMs = 1e6;

/// Of a window of ten steps, in ms per step.
StepTimes times(double data, double compute, double wait, double delayed = 0, double samples = 32) {
  return {.steps = 10,
          .samples = 10 * samples,
          .data_ns = 10 * kMs * data,
          .compute_ns = 10 * kMs * compute,
          .wait_ns = 10 * kMs * wait,
          .delayed_ns = 10 * kMs * delayed};
}

std::optional<Straggler> find(const std::vector<StepTimes>& ranks, std::vector<std::string> hosts = {}) {
  hosts.resize(ranks.size(), "a");
  return find_straggler(ranks, hosts);
}

TEST(FindStraggler, NoneWhereAllTakeEquallyLong) {
  EXPECT_FALSE(find({times(0.1, 20, 0.5), times(0.2, 20.2, 0.3)}));
  EXPECT_FALSE(find({times(0, 20, 4), times(0, 24, 0)})) << "a sixth of a step";
  EXPECT_FALSE(find({times(0, 20, 5.9, 3), times(0, 22, 4, 3)})) << "all wait for processors alike";
  EXPECT_FALSE(find({times(5, 20, 1), times(5, 21, 0)})) << "all wait for their data";
  EXPECT_FALSE(find({times(0, 20, 0)})) << "alone";
  EXPECT_FALSE(find({{}, {}})) << "nothing is known";
  EXPECT_FALSE(find({times(0, 20, 60), times(0, 20, 60)})) << "no network between them";
}

TEST(FindStraggler, ComputesSlowly) {
  const auto found = find({times(0, 20, 20), times(0, 40, 0), times(0, 21, 19)}, {"a", "b", "b"});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kComputing);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->text,
            "rank 1 (host b) holds the others up: it computes 40 ms per step, the others 20 ms, on a processor of its "
            "own → that one is slower or throttled, or shares its memory with a busy neighbour");
  EXPECT_NEAR(found->lost_ns, 195 * kMs, kMs) << "in ten steps";
}

TEST(FindStraggler, ABusyNeighbour) {
  const auto found = find({times(0, 20, 20), times(0, 40, 0, 18)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kNeighbour);
  EXPECT_EQ(found->rank, 1);
  EXPECT_THAT(found->text, AllOf(HasSubstr("computes 40 ms per step, the others 20 ms, and for 18 ms of that it waits "
                                           "for a processor → other programs run on its cores")));
}

// The rank is woken, and gets no processor: neither its computation nor anything but the kernel shows it.
TEST(FindStraggler, ANeighbourThatDelaysTheEndOfWaits) {
  const auto found = find({times(0, 20, 20), times(0, 21, 19, 15)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kNeighbour);
  EXPECT_EQ(found->rank, 1);
}

// Delays amid a long wait are no reason of anything.
TEST(FindStraggler, ANeighbourOfARankThatWaits) {
  const auto found = find({times(0, 5, 56, 50), times(0, 60, 1, 54)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kNeighbour);
  EXPECT_EQ(found->rank, 1);
}

TEST(FindStraggler, WaitsForItsData) {
  const auto found = find({times(30, 20, 0), times(0.1, 22, 28), times(0.3, 20, 30)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kData);
  EXPECT_EQ(found->rank, 0);
  EXPECT_THAT(found->text,
              HasSubstr("it waits 30 ms per step for its data, the others 0.2 ms → give it more --workers"));
}

// Its samples are more, not slower.
TEST(FindStraggler, UnevenSharesAreNotReported) {
  EXPECT_FALSE(find({times(0, 20, 10, 0, 2), times(0, 10, 20, 0, 1)}));
  EXPECT_TRUE(find({times(0, 40, 0, 0, 32), times(0, 20, 20, 0, 31)}));
}

TEST(FindStraggler, OnDevicesTheWaitForDataIsKnown) {
  const auto found = find({times(30, 0, 25), times(0.1, 0, 55)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kData);
  EXPECT_FALSE(find({times(0.1, 0, 25), times(0.1, 0, 25)}));
}

StepTimes with_peers(StepTimes times, std::vector<StepTimes::Peer> peers) {
  for (auto& peer : peers) peer.ns *= 10 * kMs;
  std::ranges::copy(peers, times.peers.begin());
  return times;
}

TEST(FindStraggler, TheLinkBetweenTwoHosts) {
  const auto found =
      find({with_peers(times(0, 20, 30), {{1, 29}}), with_peers(times(0, 19, 31), {{0, 28}})}, {"a", "b"});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kLink);
  EXPECT_THAT(found->text, HasSubstr("the link between host a and host b holds the ranks up: of 50 ms per step each "
                                     "waits 30 ms or more"));
  EXPECT_FALSE(find({with_peers(times(0, 20, 15), {{1, 29}}), with_peers(times(0, 19, 16), {{0, 28}})}, {"a", "b"}))
      << "less than half of a step";
}

TEST(FindStraggler, TheLinkOfOneOfThreeHosts) {
  const auto slow = times(0, 10, 90);
  const std::vector<std::string> hosts = {"a", "b", "c"};
  const auto found = find(
      {with_peers(slow, {{1, 5}, {2, 60}}), with_peers(slow, {{0, 5}, {2, 60}}), with_peers(slow, {{0, 80}, {1, 80}})},
      hosts);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->by, SlowBy::kLink);
  EXPECT_EQ(found->rank, 2);
  EXPECT_THAT(found->text, HasSubstr("the link of host c holds the ranks up"));
  EXPECT_FALSE(find({with_peers(slow, {{1, 60}, {2, 60}}), with_peers(slow, {{0, 60}, {2, 60}}),
                     with_peers(slow, {{0, 60}, {1, 60}})},
                    hosts))
      << "the network is slow, none of them is the reason";
  // Ranks that are none change nothing.
  EXPECT_FALSE(find({with_peers(slow, {{7, 60}}), slow, slow}, hosts));
}

TEST(Stragglers, TheSamePhaseIsTheSame) {
  const Straggler neighbour{.by = SlowBy::kNeighbour, .rank = 1}, computing{.by = SlowBy::kComputing, .rank = 1};
  EXPECT_TRUE(neighbour.is_same(computing));
  EXPECT_FALSE(neighbour.is_same({.by = SlowBy::kData, .rank = 1}));
  EXPECT_FALSE(neighbour.is_same({.by = SlowBy::kComputing, .rank = 2}));
  EXPECT_TRUE(neighbour.is_same_place({.by = SlowBy::kData, .rank = 1}));
  EXPECT_FALSE(neighbour.is_same_place({.by = SlowBy::kLink, .rank = 1}));
  EXPECT_FALSE(neighbour.is_same_place({.by = SlowBy::kComputing, .rank = 2}));
}

/// All ranks do `steps` steps, of which `take` says how long this rank's data and computation took. What is said.
template <class Take>
std::vector<std::pair<int, Straggler>> said_in(int steps, Take&& take) {
  comm::ProcessGroup& group = lockstep::testing::group();
  StragglerWatch watch(group, false);
  std::vector<std::pair<int, Straggler>> said;
  for (int step = 1; step <= steps; ++step) {
    const auto [data, compute] = take(step);
    watch.data_took(data);
    watch.begin_step();
    if (const auto found = watch.end_step(compute, 32)) said.emplace_back(step, *found);
  }
  EXPECT_EQ(watch.found().size(), said.size());
  return said;
}

TEST(StragglerWatchTest, NamesTheRankOnceByStepTwenty) {
  comm::ProcessGroup& group = lockstep::testing::group();
  const int last = group.size() - 1;
  using Times = std::pair<Clock::duration, Clock::duration>;
  const auto said = said_in(100, [&](int) { return Times(group.rank() == last ? 20ms : 0ms, 10ms); });
  if (group.rank() > 0 || group.size() == 1) {
    EXPECT_TRUE(said.empty());
    return;
  }
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].first, 20);
  EXPECT_EQ(said[0].second.rank, last);
  EXPECT_EQ(said[0].second.by, SlowBy::kData);
}

// A disturbance of one window, two reasons in turn, and a loss that is not worth a word.
TEST(StragglerWatchTest, IgnoresTransientDelays) {
  comm::ProcessGroup& group = lockstep::testing::group();
  const bool last = group.rank() == group.size() - 1;
  using Times = std::pair<Clock::duration, Clock::duration>;
  EXPECT_TRUE(said_in(60, [&](int step) { return Times(last && step > 20 && step <= 40 ? 20ms : 0ms, 10ms); }).empty());
  EXPECT_TRUE(said_in(200, [&](int) { return Times(0ms, last ? 130us : 100us); }).empty());
  EXPECT_TRUE(said_in(60, [&](int) { return Times(0ms, 10ms); }).empty());
  EXPECT_TRUE(said_in(5, [&](int) { return Times(last ? 20ms : 0ms, 10ms); }).empty());
}

// What costs little per step is named when it has cost enough.
TEST(StragglerWatchTest, SmallLossesAddUp) {
  comm::ProcessGroup& group = lockstep::testing::group();
  const bool last = group.rank() == group.size() - 1;
  using Times = std::pair<Clock::duration, Clock::duration>;
  const auto said = said_in(200, [&](int) { return Times(0ms, last ? 1500us : 1000us); });
  if (group.rank() > 0 || group.size() == 1) {
    EXPECT_TRUE(said.empty());
    return;
  }
  ASSERT_EQ(said.size(), 1u);
  EXPECT_GT(said[0].first, 60);
}

}  // namespace
}  // namespace lockstep::trainer
