// Which failures a job is started again after, with how many ranks, and when no more.
#include "launcher/restart_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace lockstep::launcher {
namespace {

using ::testing::HasSubstr;

constexpr int kKilled = 128 + SIGKILL;

AttemptEnd killed(std::optional<std::int64_t> step, std::optional<std::int64_t> checkpoint) {
  return {.exit_code = kKilled, .progress = {.step = step, .checkpoint = checkpoint}};
}

TEST(RestartPolicyTest, FailureResumesFromTheNewestCheckpoint) {
  RestartPolicy policy(3, 4, 4);
  const auto decision = policy.plan_after(killed(127, 120));
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.ranks, 4);
  EXPECT_EQ(decision.from_step, 120);
  EXPECT_EQ(decision.lost_steps, 7);
  EXPECT_EQ(decision.pause, Clock::duration::zero());
  EXPECT_EQ(policy.attempt(), 1);
}

TEST(RestartPolicyTest, RepeatableOrRequestedEndsAreNotRestarted) {
  for (const int code :
       {2, 3, 6, 7, 126, 127, 128 + SIGHUP, 128 + SIGINT, 128 + SIGQUIT, 128 + SIGTERM, 128 + SIGUSR1}) {
    RestartPolicy policy(3, 2, 1);
    const auto decision = policy.plan_after({.exit_code = code, .progress = {.step = 5, .checkpoint = 4}});
    EXPECT_FALSE(decision.restart) << code;
    EXPECT_THAT(decision.why_not, HasSubstr("not restarted: exit code " + std::to_string(code)));
    EXPECT_EQ(policy.attempt(), 0);
  }
  for (const int code : {0, 75}) {
    const auto decision = RestartPolicy(3, 2, 1).plan_after({.exit_code = code, .progress = {}});
    EXPECT_FALSE(decision.restart);
    EXPECT_EQ(decision.why_not, "");
  }
  const auto requested = RestartPolicy(3, 2, 1).plan_after({.exit_code = kKilled, .requested = true, .progress = {}});
  EXPECT_FALSE(requested.restart);
  EXPECT_EQ(requested.why_not, "");
  const auto done =
      RestartPolicy(3, 2, 1).plan_after({.exit_code = kKilled, .progress = {.step = 9, .checkpoint = 9, .done = true}});
  EXPECT_FALSE(done.restart);
  EXPECT_THAT(done.why_not, HasSubstr("their work was done"));
}

TEST(RestartPolicyTest, OtherFailuresAreRestarted) {
  for (const int code : {1, 4, 5, 42, 128 + SIGSEGV, 128 + SIGABRT, 128 + SIGBUS, kKilled}) {
    EXPECT_TRUE(RestartPolicy(1, 2, 2).plan_after({.exit_code = code, .progress = {}}).restart) << code;
    const auto none = RestartPolicy(0, 2, 2).plan_after({.exit_code = code, .progress = {}});
    EXPECT_FALSE(none.restart);
    EXPECT_EQ(none.why_not, "");
  }
}

TEST(RestartPolicyTest, TheirNumberIsBounded) {
  RestartPolicy policy(2, 2, 2);
  EXPECT_TRUE(policy.plan_after(killed(10, 10)).restart);
  EXPECT_TRUE(policy.plan_after(killed(20, 20)).restart);
  const auto last = policy.plan_after(killed(30, 30));
  EXPECT_FALSE(last.restart);
  EXPECT_THAT(last.why_not, HasSubstr("--max-restarts 2 allows no more"));
}

TEST(RestartPolicyTest, WithoutProgressBetweenTwoFailuresItStops) {
  for (const auto& first : {killed({}, {}), killed(57, 50), killed({}, 50), killed(57, {})}) {
    RestartPolicy policy(100, 2, 2);
    EXPECT_TRUE(policy.plan_after(first).restart);
    const auto again = policy.plan_after(first);
    EXPECT_FALSE(again.restart);
    EXPECT_THAT(again.why_not, HasSubstr("no further step and no newer checkpoint"));
  }
  // A step less far is none either.
  RestartPolicy policy(100, 2, 2);
  EXPECT_TRUE(policy.plan_after(killed(57, 50)).restart);
  EXPECT_FALSE(policy.plan_after(killed(55, 50)).restart);
}

TEST(RestartPolicyTest, PausesDoubleWithoutACheckpointAndEndWithOne) {
  RestartPolicy policy(1000, 2, 2);
  auto expected = std::chrono::duration_cast<Clock::duration>(RestartPolicy::kFirstPause);
  for (int step = 1; step <= 40; ++step) {
    EXPECT_EQ(policy.plan_after(killed(step, {})).pause, expected);
    expected = std::min<Clock::duration>(2 * expected, RestartPolicy::kLongestPause);
  }
  EXPECT_EQ(expected, Clock::duration(RestartPolicy::kLongestPause));
  EXPECT_EQ(policy.plan_after(killed(41, 40)).pause, Clock::duration::zero());
  EXPECT_EQ(policy.plan_after(killed(42, 40)).pause, Clock::duration(RestartPolicy::kFirstPause));
}

TEST(RestartPolicyTest, RanksAreTakenOffOneByOneDownToTheLeast) {
  RestartPolicy policy(100, 4, 2);
  EXPECT_EQ(policy.plan_after(killed(12, 10)).ranks, 4);
  EXPECT_EQ(policy.plan_after(killed(13, 10)).ranks, 4);  // the first failure without a new checkpoint
  EXPECT_EQ(policy.plan_after(killed(11, 10)).ranks, 3);
  EXPECT_EQ(policy.plan_after(killed(25, 20)).ranks, 3);  // a new checkpoint: they hold
  EXPECT_EQ(policy.plan_after(killed(26, 20)).ranks, 3);
  EXPECT_EQ(policy.plan_after(killed({}, 20)).ranks, 2);
  EXPECT_FALSE(policy.plan_after(killed({}, 20)).restart);
}

TEST(RestartPolicyTest, GrowingIsNoRestart) {
  RestartPolicy policy(1, 4, 2);
  EXPECT_TRUE(policy.plan_after(killed(12, 10)).restart);
  for (int i = 0; i < 3; ++i) {
    const std::int64_t step = 20 + 10 * i;
    const auto decision = policy.plan_after(
        {.exit_code = 75, .progress = {.step = step + 1, .checkpoint = step}, .ranks = 2, .growing = true});
    EXPECT_TRUE(decision.restart);
    EXPECT_EQ(decision.ranks, 4);
    EXPECT_EQ(decision.from_step, step);
    EXPECT_EQ(decision.lost_steps, 1);
    EXPECT_EQ(decision.pause, Clock::duration::zero());
  }
  EXPECT_EQ(policy.restarts(), 1);
  EXPECT_EQ(policy.attempt(), 4);
  EXPECT_EQ(policy.newest_checkpoint(), 40);
  EXPECT_THAT(policy.plan_after(killed(60, 50)).why_not, HasSubstr("--max-restarts 1 allows no more"));
  // The user's wish counts more, and so does the end of the work.
  EXPECT_FALSE(policy.plan_after({.exit_code = 75, .requested = true, .progress = {}, .growing = true}).restart);
  EXPECT_FALSE(policy.plan_after({.exit_code = 0, .progress = {}, .growing = true}).restart);
}

TEST(RestartPolicyTest, OtherHostsAreAReasonToTryAgain) {
  RestartPolicy policy(100, 4, 1);
  EXPECT_TRUE(policy.plan_after(killed({}, {})).restart);
  for (int i = 0; i < 3; ++i) {
    const auto decision = policy.plan_after({.exit_code = 4, .progress = {}, .ranks = 2, .hosts_change = true});
    EXPECT_TRUE(decision.restart);
    EXPECT_EQ(decision.ranks, 4) << "the hosts say how many there are";
    EXPECT_GT(decision.pause, Clock::duration::zero());
  }
  // One off those that there were.
  EXPECT_EQ(policy.plan_after({.exit_code = 137, .progress = {}, .ranks = 3}).ranks, 2);
}

TEST(RestartPolicyTest, ProgressIsAFurtherStepOrCheckpoint) {
  RestartPolicy policy(100, 2, 2);
  EXPECT_FALSE(policy.is_progress({}));
  EXPECT_TRUE(policy.is_progress({.step = 1}));
  policy.plan_after(killed(12, 10));
  EXPECT_FALSE(policy.is_progress({.step = 12, .checkpoint = 10}));
  EXPECT_TRUE(policy.is_progress({.step = 13, .checkpoint = 10}));
  EXPECT_TRUE(policy.is_progress({.checkpoint = 11}));
}

TEST(RestartPolicyTest, ContinuingInPlaceCountsAsARestart) {
  RestartPolicy policy(2, 2, 2);
  EXPECT_TRUE(policy.continue_after(10));
  EXPECT_EQ(policy.attempt(), 1);
  EXPECT_EQ(policy.restarts(), 1);
  EXPECT_TRUE(policy.continue_after(20));
  EXPECT_FALSE(policy.continue_after(30));
  EXPECT_EQ(policy.restarts(), 2);
  EXPECT_THAT(policy.plan_after(killed(31, 25)).why_not, HasSubstr("allows no more"));
}

// Where continuing leads nowhere, the checkpoint may help; where that leads nowhere either, nothing does.
TEST(RestartPolicyTest, AfterContinuingInVainAJobIsRestartedOnce) {
  RestartPolicy policy(9, 2, 2);
  EXPECT_TRUE(policy.continue_after(10));
  const auto decision = policy.plan_after(killed(10, 5));
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.from_step, 5);
  EXPECT_EQ(decision.lost_steps, 5);
  EXPECT_FALSE(policy.plan_after(killed(9, 5)).restart);
}

}  // namespace
}  // namespace lockstep::launcher
