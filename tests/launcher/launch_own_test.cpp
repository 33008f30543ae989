// Ranks that are the launcher's own binary: they run as under mpirun, and without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "base/text.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using Role = JobProcess::Role;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kIsRank1 = "[ $RANK = 1 ]";

TEST(OwnLaunchTest, NoMpirunIsNeeded) {
  const std::string directory = make_test_directory();
  // Nothing but a shell's own words: there is no PATH.
  Job job(own_sh("-n 2",
                 "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $LOCKSTEP_BIND $LOCKSTEP_ATTEMPT; "
                 "echo ${OMPI_COMM_WORLD_RANK-none} >&2"),
          {.environment = {{"PATH", directory}}, .prefix = {}, .directory = directory});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[0] 0 of 2, 0 of 2, core 0", "[1] 1 of 2, 1 of 2, core 0"));
  EXPECT_THAT(sorted_lines(job.err()), ElementsAre("[0] none", "[1] none"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(OwnLaunchTest, WithTheFlagTheyRunUnderMpirun) {
  Job job(own_sh("-n 2 --mpi", "echo ${OMPI_COMM_WORLD_RANK-none}"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[0] 0", "[1] 1"));
}

TEST(OwnLaunchTest, SevenRanksAndTheirLogs) {
  const std::string directory = make_test_directory();
  Job job(own_sh("-n 7 --log-dir " + directory + "/logs", "echo I am $RANK"),
          {.environment = {}, .prefix = {}, .directory = directory});
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (int rank = 0; rank < 7; ++rank)
    EXPECT_EQ(first_line(directory + "/logs/rank-" + std::to_string(rank) + ".log"), "I am " + std::to_string(rank));
}

TEST(OwnLaunchTest, ExitCodesPassThrough) {
  for (const int code : {1, 2, 4, 42, 75, 255}) {
    Job job(own_sh("-n 2", kIsRank1 + " && exit " + std::to_string(code) + "; exec sleep 100"));
    EXPECT_EQ(job.wait(), code);
    EXPECT_THAT(job.err(), HasSubstr(code == 75 ? "stopped on request, after saving a checkpoint" : "rank 1 of 2"));
    EXPECT_THAT(job.err(), Not(HasSubstr("mpirun")));
    EXPECT_EQ(job.leftovers(), "");
  }
}

TEST(OwnLaunchTest, ARankThatEndsWellEndsNobody) {
  Job job(own_sh("-n 3", "[ $RANK = 0 ] && exit 0; sleep 0.3; echo done"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[1] done", "[2] done"));
}

TEST(OwnLaunchTest, TheFirstFailureIsNamedWithItsLastLines) {
  Job job(own_sh("-n 3",
                 "trap 'echo I was asked; exit 9' TERM; ready=$TMPDIR/../ready; : > $ready$RANK\n"
                 "until [ -e ${ready}0 ] && [ -e ${ready}1 ] && [ -e ${ready}2 ]; do sleep 0.01; done\n" +
                     kIsRank1 + " && { echo about to fail; kill -SEGV $$; }\nwhile :; do sleep 0.01; done"));
  EXPECT_EQ(job.wait(), 128 + SIGSEGV);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("rank 1 of 3"), HasSubstr("SIGSEGV"), HasSubstr("  | about to fail\n")));
  EXPECT_THAT(job.out(), AllOf(HasSubstr("[0] I was asked\n"), HasSubstr("[2] I was asked\n")));
}

TEST(OwnLaunchTest, ArgumentsArriveAsTheyAre) {
  const std::vector<std::string> odd = {"", ":", ":\\", "a b", "$HOME", "-n", "--", "two\nlines", "\xff\xfe"};
  std::vector<std::string> arguments = {"-n", "1", "--no-prefix", "--", "lockstep", "run", "printf", "<%s>"};
  arguments.insert(arguments.end(), odd.begin(), odd.end());
  Job job(arguments);
  EXPECT_EQ(job.wait(), 0) << job.err();
  std::string expected;
  for (const auto& argument : odd) expected += "<" + argument + ">";
  EXPECT_EQ(job.out(), expected + "\n");
}

TEST(OwnLaunchTest, StopsPassTheSignalOnAndReturnIt) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    Job job(own_sh("-n 2", "trap 'echo asked; exit 1' INT TERM HUP; echo ready; while :; do sleep 0.01; done"));
    ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
    job.send(number);
    EXPECT_EQ(job.wait(), 128 + number);
    EXPECT_THAT(job.out(), HasSubstr("[1] asked"));
    EXPECT_EQ(job.leftovers(), "");
  }
}

TEST(OwnLaunchTest, AllProcessesOfAJobMayGetTheSignal) {
  Job job(own_sh("-n 2 --grace-seconds 20",
                 "trap 'sleep 0.5; echo saved; exit 75' TERM; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  job.send(SIGTERM);
  for (const auto& process : job.processes())
    if (process.role != Role::kLauncher) ::kill(process.pid, SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ::testing::IsSupersetOf({"[0] saved", "[1] saved"}));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(OwnLaunchTest, StubbornRanksEndWithTheirLauncher) {
  Job job(own_sh("-n 2", "trap '' TERM INT HUP; (setsid sleep 100) & echo ready; sleep 100; sleep 100"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  job.send(SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  EXPECT_EQ(job.leftovers_at(Deadline::after_seconds(5)), "");
}

}  // namespace
}  // namespace lockstep::launcher
