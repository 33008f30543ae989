#include "launcher/rank_status.h"

#include <gtest/gtest.h>

#include <csignal>

namespace lockstep::launcher {
namespace {

using Kind = StatusReport::Kind;

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

TEST(RankStatusTest, RanksAreListedShortly) {
  EXPECT_EQ(ranks_text({4}), "rank 4");
  EXPECT_EQ(ranks_text({0, 1}), "ranks 0 and 1");
  EXPECT_EQ(ranks_text({2, 3, 4}), "ranks 2 to 4");
  EXPECT_EQ(ranks_text({0, 2, 5}), "ranks 0, 2 and 5");
  EXPECT_EQ(ranks_text({0, 2, 4, 6, 8, 10, 12, 14}), "ranks 0, 2, 4, 6, 8, 10, 12 and 14");
  EXPECT_EQ(ranks_text({0, 2, 4, 6, 8, 10, 12, 14, 16, 18}), "ranks 0, 2, 4, 6, 8, 10, 12 and 3 more");
}

TEST(RankStatusTest, SavingRanksGetALongerGrace) {
  RankStatus status(3, {});
  EXPECT_EQ(seconds(status.grace(true)), 1);
  EXPECT_EQ(status.waited_for(true), "");
  status.add(1, {.kind = Kind::kDefersStops});
  EXPECT_EQ(seconds(status.grace(true)), 30);
  EXPECT_EQ(status.waited_for(true), "rank 1 to finish its step and save a checkpoint");
  status.add(2, {.kind = Kind::kDefersStops, .seconds = 100});
  EXPECT_EQ(seconds(status.grace(true)), 230);
  EXPECT_EQ(status.waited_for(true), "ranks 1 and 2 to finish their steps and save a checkpoint");
  // Where a rank has failed no step comes to its end.
  EXPECT_EQ(seconds(status.grace(false)), 1);
  EXPECT_EQ(status.waited_for(false), "");
  status.add(0, {.kind = Kind::kSaving, .text = "the checkpoint of step 3"});
  EXPECT_EQ(seconds(status.grace(false)), 30);
  EXPECT_EQ(status.waited_for(false), "rank 0 to write the checkpoint of step 3");
  EXPECT_EQ(status.waited_for(true), "rank 0 to write the checkpoint of step 3");
  status.add(0, {.kind = Kind::kSaved});
  status.remove(2);
  EXPECT_EQ(seconds(status.grace(true)), 30);
  status.remove(1);
  EXPECT_EQ(seconds(status.grace(true)), 1);
}

TEST(RankStatusTest, UsersGraceAppliesToAll) {
  RankStatus status(1, 5.0);
  EXPECT_EQ(seconds(status.grace(false)), 5);
  status.add(0, {.kind = Kind::kDefersStops, .seconds = 100});
  EXPECT_EQ(seconds(status.grace(true)), 5);
}

TEST(RankStatusTest, AwaitedStoppedRankIsReportedAsStopped) {
  RankStatus status(3, {});
  status.add(1, {.kind = Kind::kStopped, .number = SIGSTOP});
  status.add(1, {.kind = Kind::kContinued});
  EXPECT_EQ(status.stopped_by(1), 0);
  status.add(1, {.kind = Kind::kStopped, .number = SIGSTOP});
  status.add(2, {.kind = Kind::kMissingRanks, .ranks = {1}});
  status.add(1, {.kind = Kind::kContinued});  // mpirun ends the job
  EXPECT_EQ(status.stopped_by(1), SIGSTOP);
}

TEST(RankStatusTest, OnlyOtherRanksOfTheJobAreReportedMissing) {
  RankStatus status(3, {});
  status.add(1, {.kind = Kind::kMissingRanks, .ranks = {-1, 0, 1, 3, 2}});
  EXPECT_EQ(status.missing(1), (std::vector<int>{0, 2}));
}

}  // namespace
}  // namespace lockstep::launcher
