// Jobs on several hosts, all of which are this machine: a script in the place of ssh runs what it is given here, with
// an environment of its own.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <set>
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
using Role = JobProcess::Role;

TEST(LaunchHostsTest, UnevenSlotsMakeLocalRanksAndPrefixes) {
  Job job(sh("--hosts one:2,three:1,b_2:3 -n 5",
             "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, here $OMPI_COMM_WORLD_LOCAL_RANK of "
             "$OMPI_COMM_WORLD_LOCAL_SIZE, $FAKE_HOST $LOCKSTEP_HOST_NAME; echo oops >&2"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()),
              ElementsAre("[0@one  ] 0 of 5, here 0 of 2, one one", "[1@one  ] 1 of 5, here 1 of 2, one one",
                          "[2@three] 2 of 5, here 0 of 1, three three", "[3@b_2  ] 3 of 5, here 0 of 2, b_2 b_2",
                          "[4@b_2  ] 4 of 5, here 1 of 2, b_2 b_2"));
  EXPECT_THAT(job.err(), HasSubstr("[2@three] oops\n"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchHostsTest, TheLaunchersOwnHostTakesPartWhereverItIsNamed) {
  Job job(sh("--hosts a:1,localhost:2,127.0.0.1:1 --no-prefix",
             "echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK of $OMPI_COMM_WORLD_LOCAL_SIZE ${FAKE_HOST-here}"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("0 0 of 1 a", "1 0 of 3 here", "2 1 of 3 here", "3 2 of 3 here"));
  EXPECT_EQ(job.leftovers(), "");
  // All on one host: as without hosts, but for the prefix.
  Job alone(sh("--hosts localhost:2", "echo ${LOCKSTEP_MEETING-none}"), fake_hosts());
  EXPECT_EQ(alone.wait(), 0) << alone.err();
  EXPECT_THAT(alone.out(), AllOf(HasSubstr("[0@"), HasSubstr("] none\n")));
}

TEST(LaunchHostsTest, ALoginShellMayGreet) {
  Job job(sh("--hosts noisy-1:1,noisy-2:1", "echo hello"), fake_hosts());
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[0@noisy-1] hello", "[1@noisy-2] hello"));
}

TEST(LaunchHostsTest, RanksGetTheRendezvousAndTheUsersVariables) {
  TestJobSetup setup = fake_hosts();
  for (const char* name : {"LOCKSTEP_TEST_A", "NCCL_A", "MINE_A", "THEIRS_A"})
    setup.environment.emplace_back(name, std::string(name) + " it's $HOME");
  Job job(sh("--hosts a:1,b:1 --no-prefix -x MINE_A -x OTHER=o",
             "echo ${#LOCKSTEP_MEETING} $MASTER_ADDR $MASTER_PORT $LOCKSTEP_BIND; "
             "echo $LOCKSTEP_TEST_A,$NCCL_A,$MINE_A,$OTHER,${THEIRS_A-none}"),
          setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto lines = sorted_lines(job.out());
  ASSERT_EQ(lines.size(), 4u) << job.out();
  EXPECT_EQ(lines[0], lines[1]);
  EXPECT_EQ(lines[0].substr(0, 3), "24 ");
  EXPECT_THAT(lines[0], HasSubstr(" core"));
  EXPECT_EQ(lines[2], "LOCKSTEP_TEST_A it's $HOME,NCCL_A it's $HOME,MINE_A it's $HOME,o,none");
}

// Each rank has the job's secret, on whichever host, and no process shows it to others.
TEST(LaunchHostsTest, TheSecretIsInNoCommandLine) {
  TestJobSetup setup = fake_hosts();
  setup.environment.emplace_back("LOCKSTEP_JOB_SECRET", "the user's, which is another");
  Job job(sh("--hosts a:1,localhost:1,b:1 --no-prefix",
             "count() { awk 'index($0, ENVIRON[\"LOCKSTEP_JOB_SECRET\"]) { n++ } END { print n + 0 }'; }; "
             "echo ${#LOCKSTEP_JOB_SECRET} $(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | count) "
             "$(find $TMPDIR -type f -exec cat {} + | count); "
             "echo $LOCKSTEP_JOB_SECRET | sha256sum"),
          setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto lines = sorted_lines(job.out());
  ASSERT_EQ(lines.size(), 6u) << job.out();
  const auto first = std::ranges::find(lines, "32 0 0");
  ASSERT_NE(first, lines.end()) << job.out();
  EXPECT_EQ(std::ranges::count(lines, "32 0 0"), 3);
  std::set<std::string> digests(lines.begin(), lines.end());
  EXPECT_EQ(digests.size(), 2u) << job.out();  // one secret, and the line above

  Job refused(sh("--hosts a:1,b:1 -x LOCKSTEP_JOB_SECRET=0123456789abcdef", "echo ran"), fake_hosts());
  EXPECT_EQ(refused.wait(), 2);
  EXPECT_THAT(refused.err(), HasSubstr("--export LOCKSTEP_JOB_SECRET"));
  EXPECT_THAT(refused.err(), Not(HasSubstr("0123456789abcdef")));
}

TEST(LaunchHostsTest, HostsThatCannotTakePartAreAllNamed) {
  Job job(sh("--hosts fine-1:1,unknown-1:1,refused-1:1,locked-1:2,bare-1:1,old-1:1,ancient-1:1,mute-1:1", "echo ran"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 4);
  EXPECT_EQ(job.out(), "");
  const auto lines = sorted_lines(job.err());
  ASSERT_EQ(lines.size(), 7u) << job.err();
  EXPECT_THAT(lines[0], HasSubstr("error: host ancient-1: "));
  EXPECT_THAT(lines[0], HasSubstr("another version"));
  EXPECT_THAT(lines[1], HasSubstr("error: host bare-1: there is no "));
  EXPECT_THAT(lines[2], HasSubstr("error: host locked-1: it refuses the key"));
  EXPECT_THAT(lines[3], HasSubstr("error: host mute-1: it did not answer within 10 s"));
  EXPECT_THAT(lines[4], AllOf(HasSubstr("error: host old-1: it has lockstep 0.0.9 (git 1234567, binary abcdef)"),
                              HasSubstr("this host lockstep ")));
  EXPECT_THAT(lines[5], HasSubstr("error: host refused-1: the connection is refused"));
  EXPECT_THAT(lines[6], HasSubstr("error: host unknown-1: its name does not resolve"));
  for (const auto& line : lines) EXPECT_THAT(line, HasSubstr("→"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsTest, BadInputIsOneLine) {
  Job many(sh("--hosts a:2,b:1 -n 4", "echo ran"), fake_hosts());
  EXPECT_EQ(many.wait(), 2);
  EXPECT_EQ(
      many.err(),
      "launch: 4 ranks, but the hosts have 3 slots (a:2, b:1) → start at most 3, or give a host more slots, as in "
      "a:3\n");
  EXPECT_EQ(many.leftovers_at(within_eight()), "");

  Job missing({"--hosts", "a:1,b:1", "--", "./no-such-program"}, fake_hosts());
  EXPECT_EQ(missing.wait(), 4);
  EXPECT_THAT(missing.err(), HasSubstr("host b: there is no ./no-such-program there"));
  EXPECT_EQ(missing.leftovers_at(within_eight()), "");

  Job agent({"--hosts", "a:1", "--", "true"}, {.environment = {{"OMPI_MCA_plm_rsh_agent", "/no/such/ssh"}}});
  EXPECT_EQ(agent.wait(), 4);
  EXPECT_THAT(agent.err(), HasSubstr("/no/such/ssh"));

  Job late({"--hosts", "a:1,b:1", "--", "no-such-program"}, fake_hosts());
  EXPECT_EQ(late.wait(), 127);
  EXPECT_THAT(late.err(), AllOf(HasSubstr("cannot start no-such-program"), HasSubstr("(host ")));
}

TEST(LaunchHostsTest, AStopWhileHostsAreCalled) {
  Job job(sh("--hosts mute-1:1,a:1", "echo ran"), fake_hosts());
  while (job.running("1000").empty()) std::this_thread::sleep_for(Millis(10));
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(Deadline::after_seconds(5)), 128 + SIGTERM);
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsTest, TheFirstFailureIsNamedWithItsHost) {
  Job job(sh("--hosts a:2,b:1",
             "trap 'echo asked; exit 9' TERM; echo ready; [ $FAKE_HOST = b ] && { sleep 0.7; echo about to fail; exit "
             "6; }; "
             "while :; do sleep 0.05; done"),
          fake_hosts());
  EXPECT_EQ(job.wait(), 6);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("rank 2 of 3 (host b, pid "), HasSubstr("it exited with code 6"),
                               HasSubstr("  | about to fail\n")));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchHostsTest, SignalsReachAllHosts) {
  Job job(sh("--hosts a:1,b:1 --no-prefix",
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

TEST(LaunchHostsTest, MuchOutputArrivesWhole) {
  Job job(sh("--hosts a:1,b:2", "head -c 3000000 /dev/zero | tr '\\0' $OMPI_COMM_WORLD_RANK; printf '\\000\\377'"),
          fake_hosts());
  ASSERT_EQ(job.wait(), 0) << job.err();
  std::vector<std::string> expected;
  for (int rank = 0; rank < 3; ++rank)
    expected.push_back(fmt::format("[{}@{}] ", rank, rank == 0 ? 'a' : 'b') +
                       std::string(3'000'000, static_cast<char>('0' + rank)) + std::string("\0\xff", 2));
  EXPECT_TRUE(sorted_lines(job.out()) == expected) << job.out().size() << " bytes came out";
}

TEST(LaunchHostsTest, MpiProgramsTalkBetweenHosts) {
  Job job({"--hosts", "a:1,b:1", "--", MPI_LEAVE_PROGRAM, "abort"}, fake_hosts());
  EXPECT_EQ(job.wait(), 17) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 of 2 (host b"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchHostsFaultTest, AKilledLauncherLeavesNothing) {
  for (int round = 0; round < 3; ++round) {
    Job job({"--hosts", "a:2,b:1", "--", MPI_SPIN_PROGRAM}, fake_hosts());
    std::this_thread::sleep_for(Millis(500 * round));
    job.send(SIGKILL);
    EXPECT_EQ(job.wait(), 128 + SIGKILL);
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST(LaunchHostsFaultTest, AKilledHelperIsALostHost) {
  Job job(sh("--hosts a:1,b:2", kWait), fake_hosts());
  ASSERT_TRUE(all_ready(job, 3)) << job.err();
  const pid_t helper = helper_on(job, "b");
  ASSERT_GT(helper, 0);
  ::kill(helper, SIGKILL);
  EXPECT_EQ(job.wait(within_eight()), 4);
  EXPECT_THAT(job.err(), HasSubstr("host b (ranks 1 and 2) was lost: the connection to it ended "));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsFaultTest, HelperThatSendsGarbageIsALostHost) {
  Job job(sh("--hosts mad-1:1,b:1", kWait), fake_hosts());
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("host mad-1: "));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsFaultTest, AKilledDaemonIsNamedWithItsHost) {
  Job job(sh("--hosts a:1,b:1", kWait), fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  const pid_t daemon = named(job, "orted", "b");
  ASSERT_GT(daemon, 0);
  ::kill(daemon, SIGKILL);
  EXPECT_EQ(job.wait(within_eight()), 4);
  EXPECT_THAT(job.err(), HasSubstr("Open MPI's daemon on host b"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsFaultTest, AHostThatFallsSilentIsNamedAndItsSilenceExplainsWhatFollows) {
  // Rank 0 notices, as a rank that waits for the other would, and leaves with the code for that.
  Job job(sh("--hosts a:1,b:1 --host-timeout-seconds 6",
             "echo ready; [ $FAKE_HOST = a ] && { until [ -e $TMPDIR/../stopped ]; do sleep 0.05; done; sleep 4; exit "
             "5; }; "
             "while :; do sleep 0.05; done"),
          fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  const pid_t helper = helper_on(job, "b");
  ASSERT_GT(helper, 0);
  ::kill(helper, SIGSTOP);
  std::ofstream(job.directory() + "/stopped") << "yes";
  EXPECT_EQ(job.wait(Deadline::after_seconds(20)), 4);
  EXPECT_THAT(job.err(), HasSubstr("host b (rank 1) was lost: it was last heard from "));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST(LaunchHostsFaultTest, AShortSilenceIsForgiven) {
  Job job(sh("--hosts a:1,b:1 --host-timeout-seconds 20", "echo ready; sleep 4; echo done"), fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  const pid_t helper = helper_on(job, "b");
  ASSERT_GT(helper, 0);
  ::kill(helper, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  ::kill(helper, SIGCONT);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ElementsAre("[0@a] done", "[0@a] ready", "[1@b] done", "[1@b] ready"));
}

TEST(LaunchHostsFaultTest, AStoppedLauncherStopsNobody) {
  Job job(sh("--hosts a:1,b:1 --host-timeout-seconds 6", "echo ready; sleep 10; echo done"), fake_hosts());
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  job.send(SIGTSTP);
  std::this_thread::sleep_for(std::chrono::seconds(8));
  EXPECT_GT(helper_on(job, "b"), 0);
  job.send(SIGCONT);
  EXPECT_EQ(job.wait(Deadline::after_seconds(60)), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[1@b] done"));
}

}  // namespace
}  // namespace lockstep::launcher
