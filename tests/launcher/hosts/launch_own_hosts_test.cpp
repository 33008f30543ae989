// Ranks that are the launcher's own binary, on several hosts: the helpers start them, without mpirun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "base/text.h"
#include "tests/launcher/hosts/fake_hosts.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(OwnHostsTest, UnevenSlotsMakeLocalRanksWithoutMpirun) {
  Job job(own_sh("--hosts one:2,localhost:1,b_2:3 -n 5 --no-prefix",
                 "echo $RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE, ${FAKE_HOST-own} "
                 "${OMPI_COMM_WORLD_RANK-none}; echo oops $RANK >&2"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("0 of 5, here 0 of 2, one none", "1 of 5, here 1 of 2, one none",
                                                   "2 of 5, here 0 of 1, own none", "3 of 5, here 0 of 2, b_2 none",
                                                   "4 of 5, here 1 of 2, b_2 none"));
  EXPECT_THAT(sorted_lines(job.err()), ElementsAre("oops 0", "oops 1", "oops 2", "oops 3", "oops 4"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(OwnHostsTest, WithTheFlagTheyRunUnderMpirun) {
  Job job(own_sh("--hosts a:1,b:1 --mpi", "echo ${OMPI_COMM_WORLD_RANK-none}"), fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[0@a] 0", "[1@b] 1"));
}

TEST(OwnHostsTest, RanksGetTheRendezvousAndTheUsersVariables) {
  TestJobSetup setup = fake_hosts();
  for (const char* name : {"LOCKSTEP_TEST_A", "NCCL_A", "MINE_A", "THEIRS_A"})
    setup.environment.emplace_back(name, std::string(name) + " it's $HOME");
  Job job(own_sh("--hosts a:1,localhost:1,b:1 --no-prefix -x MINE_A -x OTHER=o",
                 "echo ${#LOCKSTEP_MEETING} $MASTER_ADDR $MASTER_PORT $LOCKSTEP_BIND $LOCKSTEP_ATTEMPT "
                 "$(echo $LOCKSTEP_JOB_SECRET | sha256sum); "
                 "echo $LOCKSTEP_TEST_A,$NCCL_A,$MINE_A,$OTHER"),
          setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto lines = sorted_lines(job.out());
  ASSERT_EQ(lines.size(), 6u) << job.out();
  EXPECT_EQ(lines[0], lines[1]);
  EXPECT_EQ(lines[0], lines[2]);
  EXPECT_THAT(lines[0], AllOf(::testing::StartsWith("24 "), HasSubstr(" core 0 ")));
  for (int i = 3; i < 6; ++i)
    EXPECT_EQ(lines[static_cast<std::size_t>(i)], "LOCKSTEP_TEST_A it's $HOME,NCCL_A it's $HOME,MINE_A it's $HOME,o");
}

TEST(OwnHostsTest, RanksStartInTheLaunchersDirectory) {
  TestJobSetup setup = fake_hosts();
  setup.prefix = {"env", "-C", setup.directory};
  Job job(own_sh("--hosts a:1,localhost:1 --no-prefix", "pwd"), setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre(setup.directory, setup.directory));
}

TEST(OwnHostsTest, TheSecretIsInNoCommandLine) {
  Job job(own_sh("--hosts a:1,localhost:1 --no-prefix",
                 "count() { awk 'index($0, ENVIRON[\"LOCKSTEP_JOB_SECRET\"]) { n++ } END { print n + 0 }'; }; "
                 "echo ${#LOCKSTEP_JOB_SECRET} $(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | count)"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("32 0", "32 0"));
}

TEST(OwnHostsTest, TheFirstFailureIsNamedWithItsHost) {
  Job job(own_sh("--hosts a:2,b:1",
                 "trap 'echo asked; exit 9' TERM; echo ready\n"
                 "[ $FAKE_HOST = b ] && { sleep 0.7; echo about to fail; exit 6; }; while :; do sleep 0.05; done"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 6);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("rank 2 of 3 (host b, pid "), HasSubstr("it exited with code 6"),
                               HasSubstr("  | about to fail\n")));
  EXPECT_THAT(job.out(), AllOf(HasSubstr("[0@a] asked"), HasSubstr("[1@a] asked")));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(OwnHostsTest, SignalsReachAllHosts) {
  Job job(own_sh("--hosts a:1,b:1 --no-prefix",
                 "trap 'echo used' USR1; trap 'echo asked; exit 1' TERM; echo ready; while :; do sleep 0.05; done"),
          fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  job.send(SIGUSR1);
  ASSERT_TRUE(job.says("used\nused\n"));
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
  EXPECT_THAT(job.out(), HasSubstr("asked\nasked\n"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(OwnHostsTest, ARankThatEndsWellEndsNobody) {
  Job job(own_sh("--hosts a:1,b:2", "[ $RANK = 2 ] || exit 0; sleep 0.3; echo done"), fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[2@b] done\n");
}

TEST(OwnHostsFaultTest, AKilledWrapperIsNamed) {
  for (const char* host : {"b", "a"}) {
    Job job(own_sh("--hosts a:1,b:1", kWait), fake_hosts());
    ASSERT_TRUE(all_ready(job, 2)) << job.err();
    const auto wrappers = job.running("_rank", "FAKE_HOST", host);
    ASSERT_EQ(wrappers.size(), 1u);
    ::kill(wrappers[0], SIGKILL);
    EXPECT_EQ(job.wait(within_eight()), 137);
    EXPECT_THAT(job.err(), AllOf(HasSubstr("(host " + std::string(host) + ", pid "), HasSubstr("wrapper")));
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST(OwnHostsFaultTest, AKilledHelperIsALostHostAlsoTheFirst) {
  for (const char* host : {"a", "b"}) {
    Job job(own_sh("--hosts a:1,b:2", kWait), fake_hosts());
    ASSERT_TRUE(all_ready(job, 3)) << job.err();
    const pid_t helper = helper_on(job, host);
    ASSERT_GT(helper, 0);
    ::kill(helper, SIGKILL);
    EXPECT_EQ(job.wait(within_eight()), 4);
    EXPECT_THAT(job.err(), HasSubstr(host[0] == 'a' ? "host a (rank 0) was lost: the connection to it ended "
                                                    : "host b (ranks 1 and 2) was lost: the connection to it ended "));
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST(OwnHostsFaultTest, AKilledLauncherLeavesNothing) {
  for (int round = 0; round < 3; ++round) {
    Job job(own_sh("--hosts a:2,localhost:1,b:1", std::string("trap '' TERM; (setsid sleep 100) & ") + kWait),
            fake_hosts());
    std::this_thread::sleep_for(Millis(300 * round));
    job.send(SIGKILL);
    EXPECT_EQ(job.wait(), 128 + SIGKILL);
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST(OwnHostsFaultTest, AHostThatFallsSilentIsNamed) {
  Job job(own_sh("--hosts a:1,b:1 --host-timeout-seconds 6", kWait), fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  const pid_t helper = helper_on(job, "b");
  ASSERT_GT(helper, 0);
  ::kill(helper, SIGSTOP);
  EXPECT_EQ(job.wait(Deadline::after_seconds(20)), 4);
  EXPECT_THAT(job.err(), HasSubstr("host b (rank 1) was lost: it was last heard from "));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

}  // namespace
}  // namespace lockstep::launcher
