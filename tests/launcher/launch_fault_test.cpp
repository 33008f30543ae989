// Deaths at random moments: who is named, and that 2 s later nothing of the job is left.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <thread>

#include "base/text.h"
#include "lockstep/base/env.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using Role = JobProcess::Role;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr double kEverythingEndsSeconds = 2.0;  // the promise that is tested here

const char* name_of(Role role) {
  constexpr const char* kNames[] = {"launcher", "mpirun", "wrapper", "program"};
  return kNames[static_cast<int>(role)];
}

/// Who dies, and whether the launcher has started the ranks itself.
class DeathTest : public ::testing::TestWithParam<std::pair<Role, bool>> {};

TEST_P(DeathTest, AtARandomMoment) {
  const auto [victim, own_ranks] = GetParam();
  const auto seed = parse_int(env("LOCKSTEP_TEST_SEED").value_or("")).value_or(std::random_device()());
  for (int round = 0; round < 5; ++round) {
    std::mt19937 random(static_cast<std::uint32_t>(seed + round));
    const int ranks = 2 + static_cast<int>(random() % 2);
    const int rank = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const auto moment = Millis(random() % 400);
    SCOPED_TRACE(fmt::format("LOCKSTEP_TEST_SEED={}: {} of rank {} of {} after {} ms", seed + round, name_of(victim),
                             rank, ranks, moment.count()));
    const std::string count = std::to_string(ranks);
    Job job(own_ranks ? own_sh("-n " + count, kWait) : std::vector<std::string>{"-n", count, "--", MPI_SPIN_PROGRAM});
    std::this_thread::sleep_for(moment);
    const JobProcess target =
        victim == Role::kLauncher ? JobProcess{job.launcher(), victim, 0} : job.find(victim, rank);
    ASSERT_GT(target.pid, 0);
    ASSERT_EQ(::kill(target.pid, SIGKILL), 0);
    const Deadline deadline = Deadline::after_seconds(kEverythingEndsSeconds);

    const int code = job.wait(deadline);
    EXPECT_EQ(job.leftovers_at(deadline), "");
    switch (victim) {
      case Role::kLauncher: EXPECT_EQ(code, 137); break;
      case Role::kMpirun:
        EXPECT_EQ(code, 4) << job.err();
        EXPECT_THAT(job.err(), HasSubstr("mpirun"));
        break;
      case Role::kWrapper:
        EXPECT_EQ(code, 137) << job.err();
        // Killed in its first moments, it is one of those that had not reported.
        EXPECT_THAT(job.err(), AnyOf(HasSubstr(fmt::format("rank {} of {}", rank, ranks)),
                                     AllOf(HasSubstr("never started"), HasSubstr(std::to_string(rank)))));
        break;
      case Role::kProgram:
        EXPECT_EQ(code, 137) << job.err();
        EXPECT_THAT(job.err(), HasSubstr(fmt::format("rank {} of {}", rank, ranks)));
        break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeathTest,
                         ::testing::Values(std::pair(Role::kLauncher, false), std::pair(Role::kMpirun, false),
                                           std::pair(Role::kWrapper, false), std::pair(Role::kProgram, false),
                                           std::pair(Role::kLauncher, true), std::pair(Role::kWrapper, true),
                                           std::pair(Role::kProgram, true)),
                         [](const auto& test) {
                           return name_of(test.param.first) + std::string(test.param.second ? "OfOwnRanks" : "");
                         });

TEST(StubbornRanksTest, AreEndedWithinTheGrace) {
  const auto kills_one = [](Job& job) { ASSERT_EQ(::kill(job.find(Role::kProgram, 1).pid, SIGKILL), 0); };
  expect_job("-n 3", "trap '' TERM; echo ready; while :; do sleep 0.01; done",
             {.ready = 3, .act = kills_one, .code = 137, .seconds = kEverythingEndsSeconds, .clean_seconds = kByThen});
}

TEST(StubbornRanksTest, EndWithTheirLauncherToo) {
  expect_job("-n 2", "trap '' TERM INT HUP; (setsid sleep 100) & echo ready; sleep 100; sleep 100",
             {.start = kBoth,
              .ready = 2,
              .act = sends(SIGKILL),
              .code = 137,
              .seconds = kEverythingEndsSeconds,
              .clean_seconds = kByThen});
}

}  // namespace
}  // namespace lockstep::launcher
