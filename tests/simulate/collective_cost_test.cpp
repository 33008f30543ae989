#include "simulate/collective_cost.h"

#include <gmock/gmock.h>

#include <cmath>

#include "lockstep/base/error.h"
#include "simulate/failures.h"

namespace lockstep::simulate {
namespace {

using ::testing::HasSubstr;

constexpr double kMega = 1e6;

Fabric two_levels() {
  return {.ranks_per_node = 4,
          .inside = {.bytes_per_s = 100e9, .latency_s = 2e-6},
          .between = {.bytes_per_s = 10e9, .latency_s = 10e-6}};
}

double seconds(const Fabric& fabric, int nodes, Algorithm algorithm, double bytes) {
  return CollectiveCosts(fabric, nodes, algorithm, {}).allreduce(bytes).seconds;
}

TEST(CollectiveCost, OneRankPaysNothing) {
  Fabric alone = two_levels();
  alone.ranks_per_node = 1;
  for (const Algorithm each : algorithms()) EXPECT_EQ(seconds(alone, 1, each, 100 * kMega), 0);
}

TEST(CollectiveCost, IsThatOfTheFormulas) {
  const Fabric f = two_levels();
  // 8 ranks: 14 steps of the slower link's latency, 7/4 of the bytes over it.
  EXPECT_DOUBLE_EQ(seconds(f, 2, Algorithm::kRing, 80 * kMega), 14 * 10e-6 + 1.75 * 80e6 / 10e9);
  // One level of nodes, three more ranks on each, twice.
  EXPECT_DOUBLE_EQ(seconds(f, 2, Algorithm::kTree, 80 * kMega), 2 * (10e-6 + 3 * 2e-6) + 2 * 80e6 / 10e9);
  EXPECT_DOUBLE_EQ(seconds(f, 2, Algorithm::kTwoLevel, 80 * kMega),
                   6 * 2e-6 + 1.5 * 80e6 / 100e9 + 2 * 10e-6 + 80e6 / 10e9);
  EXPECT_DOUBLE_EQ(seconds(f, 2, Algorithm::kDirect, 80 * kMega), 2 * 2e-6 + 2 * 10e-6 + 2 * 2e-6 + 80e6 / 10e9);
  EXPECT_DOUBLE_EQ(seconds(f, 1, Algorithm::kRing, 80 * kMega), 6 * 2e-6 + 1.5 * 80e6 / 100e9);
}

TEST(CollectiveCost, AutoIsTheFastestAndManyNodesWantTrees) {
  const Fabric f = two_levels();
  for (const int nodes : {1, 2, 16, 4096})
    for (const double bytes : {8.0, 1e4, 1e6, 1e9}) {
      const double fastest =
          std::min({seconds(f, nodes, Algorithm::kRing, bytes), seconds(f, nodes, Algorithm::kTree, bytes),
                    seconds(f, nodes, Algorithm::kTwoLevel, bytes)});
      EXPECT_DOUBLE_EQ(seconds(f, nodes, Algorithm::kAuto, bytes), fastest) << nodes << " " << bytes;
    }
  EXPECT_EQ(CollectiveCosts(f, 4096, Algorithm::kAuto, {}).source(1e6), "tree");
  EXPECT_EQ(CollectiveCosts(f, 2, Algorithm::kAuto, {}).source(1e9), "two-level");
}

TEST(CollectiveCost, OversubscribedLinksCountAboveASwitchAlone) {
  Fabric f = two_levels();
  const double before = seconds(f, 8, Algorithm::kTwoLevel, 1e9);
  f.nodes_per_switch = 8;
  f.oversubscription = 4;
  EXPECT_DOUBLE_EQ(seconds(f, 8, Algorithm::kTwoLevel, 1e9), before);
  EXPECT_GT(seconds(f, 16, Algorithm::kTwoLevel, 1e9), 3.5 * before);
}

TEST(CollectiveCost, AThreadThatMovesBytesIsBusy) {
  const Cost slow_wire =
      CollectiveCosts({.ranks_per_node = 1, .between = {.bytes_per_s = 0.125e9}, .thread_bytes_per_s = 2.5e9}, 2,
                      Algorithm::kDirect, {})
          .allreduce(100 * kMega);
  EXPECT_NEAR(slow_wire.seconds, 0.8, 0.001);
  EXPECT_NEAR(slow_wire.thread_s, 0.04, 0.001);
  // The wire is faster than the thread: the thread bounds it.
  const Cost fast_wire =
      CollectiveCosts({.ranks_per_node = 1, .between = {.bytes_per_s = 12.5e9}, .thread_bytes_per_s = 2.5e9}, 2,
                      Algorithm::kDirect, {})
          .allreduce(100 * kMega);
  EXPECT_NEAR(fast_wire.seconds, 0.04, 0.001);
  EXPECT_DOUBLE_EQ(fast_wire.seconds, fast_wire.thread_s);
}

const char* const kLines =
    "{\"collective\":\"allreduce\",\"bytes\":1000,\"time_us\":10,\"world_size\":4}\n"
    "{\"collective\":\"allreduce\",\"bytes\":3000,\"time_us\":20,\"world_size\":4}\n\n"
    "{\"collective\":\"allreduce\",\"bytes\":1000,\"time_us\":7,\"world_size\":2}\n";

TEST(MeasuredTimes, CountWhereRanksAndNodesAreTheSame) {
  const auto measured = parse_measured(kLines, "times", 1);
  ASSERT_EQ(measured.size(), 2u);
  const Fabric f = two_levels();
  const CollectiveCosts here(f, 1, Algorithm::kRing, measured);
  EXPECT_EQ(here.source(1), "measured");
  EXPECT_DOUBLE_EQ(here.allreduce(10).seconds, 10e-6);
  EXPECT_DOUBLE_EQ(here.allreduce(2000).seconds, 15e-6);
  EXPECT_DOUBLE_EQ(here.allreduce(6000).seconds, 40e-6);
  EXPECT_DOUBLE_EQ(here.reduce_scatter(6000).seconds, 20e-6);
  EXPECT_EQ(CollectiveCosts(f, 2, Algorithm::kRing, measured).source(1), "ring");
}

TEST(MeasuredTimes, RefuseOtherContent) {
  for (const char* const bad :
       {"", "x", "[]", "{}", "{\"collective\":\"broadcast\",\"bytes\":1,\"time_us\":1,\"world_size\":2}",
        "{\"collective\":\"allreduce\",\"bytes\":0,\"time_us\":1,\"world_size\":2}",
        "{\"collective\":\"allreduce\",\"bytes\":1,\"time_us\":0,\"world_size\":2}",
        "{\"collective\":\"allreduce\",\"bytes\":1,\"time_us\":1,\"world_size\":1}",
        "{\"collective\":\"allreduce\",\"bytes\":1.5,\"time_us\":1,\"world_size\":2}",
        "{\"collective\":\"allreduce\",\"bytes\":1,\"time_us\":\"1\",\"world_size\":2}"}) {
    try {
      parse_measured(bad, "the file", 1);
      ADD_FAILURE() << bad;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the file, line 1"));
      EXPECT_THAT(error.remedy(), HasSubstr("bench allreduce --json"));
    }
  }
}

TEST(Failures, YoungsIntervalIsTheSquareRoot) {
  EXPECT_DOUBLE_EQ(young_interval_s({.node_mtbf_s = 8e6, .checkpoint_s = 100}, 4), std::sqrt(2.0 * 100 * 2e6));
}

TEST(Failures, NoOtherIntervalIsMuchBetterThanDalys) {
  for (const double checkpoint : {5.0, 60.0, 600.0})
    for (const int nodes : {1, 100, 4000}) {
      const Failures f{.node_mtbf_s = 4e6, .checkpoint_s = checkpoint, .restart_s = 120};
      const double interval = daly_interval_s(f, nodes);
      double best = slowdown(f, nodes, interval);
      EXPECT_GE(best, 1);
      for (double other = interval / 20; other < 20 * interval; other *= 1.05)
        EXPECT_GE(slowdown(f, nodes, other), 0.998 * best) << checkpoint << " " << nodes << " " << other;
    }
}

TEST(Failures, NothingFailsForever) {
  const Failures never{.checkpoint_s = 10};
  EXPECT_TRUE(std::isinf(daly_interval_s(never, 100)));
  EXPECT_EQ(slowdown(never, 100, daly_interval_s(never, 100)), 1);
  EXPECT_DOUBLE_EQ(slowdown(never, 100, 90), 100.0 / 90);
}

}  // namespace
}  // namespace lockstep::simulate
