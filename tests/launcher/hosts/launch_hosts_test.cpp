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
using ::testing::HasSubstr;

auto signals_helper(const char* host, int signal_number) {
  return [=](Job& job) {
    const pid_t helper = helper_on(job, host);
    ASSERT_GT(helper, 0);
    ::kill(helper, signal_number);
  };
}

TEST(LaunchHostsTest, UnevenSlotsMakeLocalRanksAndPrefixes) {
  expect_job("--hosts one:2,three:1,b_2:3 -n 5",
             "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, here $OMPI_COMM_WORLD_LOCAL_RANK of "
             "$OMPI_COMM_WORLD_LOCAL_SIZE, $FAKE_HOST $LOCKSTEP_HOST_NAME; echo oops >&2",
             {.err = {"[2@three] oops\n"},
              .lines = {"[0@one  ] 0 of 5, here 0 of 2, one one", "[1@one  ] 1 of 5, here 1 of 2, one one",
                        "[2@three] 2 of 5, here 0 of 1, three three", "[3@b_2  ] 3 of 5, here 0 of 2, b_2 b_2",
                        "[4@b_2  ] 4 of 5, here 1 of 2, b_2 b_2"}});
  expect_job(
      "--hosts one:2,localhost:1,b_2:3 -n 5 --no-prefix",
      "echo $RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE, ${FAKE_HOST-own} "
      "${OMPI_COMM_WORLD_RANK-none}; echo oops $RANK >&2",
      {.start = kOwn,
       .lines = {"0 of 5, here 0 of 2, one none", "1 of 5, here 1 of 2, one none", "2 of 5, here 0 of 1, own none",
                 "3 of 5, here 0 of 2, b_2 none", "4 of 5, here 1 of 2, b_2 none"},
       .err_lines = {"oops 0", "oops 1", "oops 2", "oops 3", "oops 4"}});
  expect_job("--hosts a:1,b:1 --mpi", "echo ${OMPI_COMM_WORLD_RANK-none}",
             {.start = kOwn, .lines = {"[0@a] 0", "[1@b] 1"}});
}

TEST(LaunchHostsTest, TheLaunchersOwnHostTakesPartWhereverItIsNamed) {
  expect_job("--hosts a:1,localhost:2,127.0.0.1:1 --no-prefix",
             "echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK of $OMPI_COMM_WORLD_LOCAL_SIZE ${FAKE_HOST-here}",
             {.lines = {"0 0 of 1 a", "1 0 of 3 here", "2 1 of 3 here", "3 2 of 3 here"}});
  // All on one host: as without hosts, but for the prefix.
  expect_job("--hosts localhost:2", "echo ${LOCKSTEP_MEETING-none}", {.out = {"[0@", "] none\n"}});
}

TEST(LaunchHostsTest, ALoginShellMayGreet) {
  expect_job("--hosts noisy-1:1,noisy-2:1", "echo hello", {.lines = {"[0@noisy-1] hello", "[1@noisy-2] hello"}});
}

TEST(LaunchHostsTest, RanksGetTheRendezvousAndTheUsersVariables) {
  std::vector<std::pair<std::string, std::string>> variables;
  for (const char* name : {"LOCKSTEP_TEST_A", "NCCL_A", "MINE_A", "THEIRS_A"})
    variables.emplace_back(name, std::string(name) + " it's $HOME");
  for (const bool own : {false, true}) {
    const auto arrive = [&](const Job& job) {
      const auto lines = sorted_lines(job.out());
      ASSERT_EQ(lines.size(), 6u) << job.out();
      EXPECT_THAT(lines[0], AllOf(::testing::StartsWith("24 "), HasSubstr(own ? " core 0 " : " core")));
      for (const std::size_t i : {1, 2}) EXPECT_EQ(lines[i], lines[0]);
      for (const std::size_t i : {3, 4, 5})
        EXPECT_EQ(lines[i], std::string("LOCKSTEP_TEST_A it's $HOME,NCCL_A it's $HOME,MINE_A it's $HOME,o") +
                                (own ? "" : ",none"));
    };
    // The launcher's own host has all variables of the environment.
    expect_job(own ? "--hosts a:1,localhost:1,b:1 --no-prefix -x MINE_A -x OTHER=o"
                   : "--hosts a:1,c:1,b:1 --no-prefix -x MINE_A -x OTHER=o",
               std::string("echo ${#LOCKSTEP_MEETING} $MASTER_ADDR $MASTER_PORT $LOCKSTEP_BIND $LOCKSTEP_ATTEMPT "
                           "$(echo $LOCKSTEP_JOB_SECRET | sha256sum); echo $LOCKSTEP_TEST_A,$NCCL_A,$MINE_A,$OTHER") +
                   (own ? "" : ",${THEIRS_A-none}"),
               {.start = own ? kOwn : kMpirun, .then = arrive, .environment = variables});
  }
}

// Each rank has the job's secret, on whichever host, and no process shows it to others.
TEST(LaunchHostsTest, TheSecretIsInNoCommandLine) {
  const auto is_hidden = [](const Job& job) {
    const auto lines = sorted_lines(job.out());
    ASSERT_EQ(lines.size(), 6u) << job.out();
    EXPECT_EQ(std::ranges::count(lines, "32 0 0"), 3) << job.out();
    EXPECT_EQ(std::set(lines.begin(), lines.end()).size(), 2u) << job.out();  // one secret, and the line above
  };
  expect_job(
      "--hosts a:1,localhost:1,b:1 --no-prefix",
      "count() { awk 'index($0, ENVIRON[\"LOCKSTEP_JOB_SECRET\"]) { n++ } END { print n + 0 }'; }; "
      "echo ${#LOCKSTEP_JOB_SECRET} $(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | count) "
      "$(find $TMPDIR -type f -exec cat {} + | count); "
      "echo $LOCKSTEP_JOB_SECRET | sha256sum",
      {.start = kBoth, .then = is_hidden, .environment = {{"LOCKSTEP_JOB_SECRET", "the user's, which is another"}}});
  expect_job("--hosts a:1,b:1 -x LOCKSTEP_JOB_SECRET=0123456789abcdef", "echo ran",
             {.code = 2, .err = {"--export LOCKSTEP_JOB_SECRET"}, .not_err = {"0123456789abcdef"}, .clean_seconds = 8});
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
  const auto is_one_line = [](const Job& job) {
    EXPECT_EQ(
        job.err(),
        "launch: 4 ranks, but the hosts have 3 slots (a:2, b:1) → start at most 3, or give a host more slots, as in "
        "a:3\n");
  };
  expect_job("--hosts a:2,b:1 -n 4", "echo ran", {.code = 2, .clean_seconds = 8, .then = is_one_line});
  expect_job("--hosts a:1,b:1", "",
             {.code = 4,
              .err = {"host b: there is no ./no-such-program there"},
              .clean_seconds = 8,
              .program = {"./no-such-program"}});
  expect_job("--hosts a:1", "",
             {.code = 4,
              .err = {"/no/such/ssh"},
              .environment = {{"OMPI_MCA_plm_rsh_agent", "/no/such/ssh"}},
              .program = {"true"}});
  expect_job("--hosts a:1,b:1", "",
             {.code = 127,
              .err = {"cannot start no-such-program", "(host "},
              .clean_seconds = 8,
              .program = {"no-such-program"}});
}

TEST(LaunchHostsTest, AStopWhileHostsAreCalled) {
  const auto asks = [](Job& job) {
    while (job.running("1000").empty()) std::this_thread::sleep_for(Millis(10));
    job.send(SIGTERM);
  };
  expect_job("--hosts mute-1:1,a:1", "echo ran",
             {.act = asks, .code = 128 + SIGTERM, .seconds = 5, .clean_seconds = 8});
}

TEST(LaunchHostsTest, TheFirstFailureIsNamedWithItsHost) {
  expect_job("--hosts a:2,b:1",
             "trap 'echo asked; exit 9' TERM; echo ready\n"
             "[ $FAKE_HOST = b ] && { sleep 0.7; echo about to fail; exit 6; }; while :; do sleep 0.05; done",
             {.start = kBoth,
              .code = 6,
              .out = {"[0@a] asked", "[1@a] asked"},
              .err = {"rank 2 of 3 (host b, pid ", "it exited with code 6", "  | about to fail\n"}});
}

TEST(LaunchHostsTest, SignalsReachAllHosts) {
  const auto signals = [](Job& job) {
    job.send(SIGUSR1);
    ASSERT_TRUE(job.says("used\nused\n"));
    job.send(SIGTERM);
  };
  expect_job("--hosts a:1,b:1 --no-prefix",
             "trap 'echo used' USR1; trap 'echo asked; exit 1' TERM; echo ready; while :; do sleep 0.05; done",
             {.start = kBoth, .ready = 2, .act = signals, .code = 128 + SIGTERM, .out = {"asked\nasked\n"}});
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
  expect_job("--hosts a:1,b:1", "",
             {.code = 17, .err = {"rank 1 of 2 (host b"}, .program = {MPI_LEAVE_PROGRAM, "abort"}});
}

TEST(LaunchHostsFaultTest, AKilledLauncherLeavesNothing) {
  for (int round = 0; round < 3; ++round) {
    const auto kills_after = [round](int ms) {
      return [=](Job& job) {
        std::this_thread::sleep_for(Millis(ms * round));
        job.send(SIGKILL);
      };
    };
    expect_job("--hosts a:2,b:1", "",
               {.act = kills_after(500), .code = 128 + SIGKILL, .clean_seconds = 8, .program = {MPI_SPIN_PROGRAM}});
    expect_job("--hosts a:2,localhost:1,b:1", std::string("trap '' TERM; (setsid sleep 100) & ") + kWait,
               {.start = kOwn, .act = kills_after(300), .code = 128 + SIGKILL, .clean_seconds = 8});
  }
}

TEST(LaunchHostsFaultTest, AKilledHelperIsALostHost) {
  expect_job("--hosts a:1,b:2", kWait,
             {.start = kBoth,
              .ready = 3,
              .act = signals_helper("b", SIGKILL),
              .code = 4,
              .err = {"host b (ranks 1 and 2) was lost: the connection to it ended "},
              .seconds = 8,
              .clean_seconds = 8});
  expect_job("--hosts a:1,b:2", kWait,
             {.start = kOwn,
              .ready = 3,
              .act = signals_helper("a", SIGKILL),
              .code = 4,
              .err = {"host a (rank 0) was lost: the connection to it ended "},
              .seconds = 8,
              .clean_seconds = 8});
}

TEST(LaunchHostsFaultTest, HelperThatSendsGarbageIsALostHost) {
  expect_job("--hosts mad-1:1,b:1", kWait, {.code = 4, .err = {"host mad-1: "}, .clean_seconds = 8});
}

TEST(LaunchHostsFaultTest, AKilledDaemonIsNamedWithItsHost) {
  const auto kills_daemon = [](Job& job) {
    const pid_t daemon = named(job, "orted", "b");
    ASSERT_GT(daemon, 0);
    ::kill(daemon, SIGKILL);
  };
  expect_job("--hosts a:1,b:1", kWait,
             {.ready = 2,
              .act = kills_daemon,
              .code = 4,
              .err = {"Open MPI's daemon on host b"},
              .seconds = 8,
              .clean_seconds = 8});
}

TEST(LaunchHostsFaultTest, AHostThatFallsSilentIsNamedAndItsSilenceExplainsWhatFollows) {
  // Rank 0 notices, as a rank that waits for the other would, and leaves with the code for that.
  const auto stops_helper = [](Job& job) {
    signals_helper("b", SIGSTOP)(job);
    std::ofstream(job.directory() + "/stopped") << "yes";
  };
  const JobOutcome outcome = {.ready = 2,
                              .act = stops_helper,
                              .code = 4,
                              .err = {"host b (rank 1) was lost: it was last heard from "},
                              .seconds = 20,
                              .clean_seconds = 8};
  expect_job("--hosts a:1,b:1 --host-timeout-seconds 6",
             "echo ready; [ $FAKE_HOST = a ] && { until [ -e $TMPDIR/../stopped ]; do sleep 0.05; done; sleep 4; exit "
             "5; }; while :; do sleep 0.05; done",
             outcome);
  JobOutcome of_own_ranks = outcome;
  of_own_ranks.start = kOwn;
  expect_job("--hosts a:1,b:1 --host-timeout-seconds 6", kWait, of_own_ranks);
}

TEST(LaunchHostsFaultTest, AShortSilenceIsForgiven) {
  const auto stops_it_for_a_while = [](Job& job) {
    signals_helper("b", SIGSTOP)(job);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    signals_helper("b", SIGCONT)(job);
  };
  expect_job(
      "--hosts a:1,b:1 --host-timeout-seconds 20", "echo ready; sleep 4; echo done",
      {.ready = 2, .act = stops_it_for_a_while, .lines = {"[0@a] done", "[0@a] ready", "[1@b] done", "[1@b] ready"}});
}

TEST(LaunchHostsFaultTest, AStoppedLauncherStopsNobody) {
  const auto stops_launcher = [](Job& job) {
    job.send(SIGTSTP);
    std::this_thread::sleep_for(std::chrono::seconds(8));
    EXPECT_GT(helper_on(job, "b"), 0);
    job.send(SIGCONT);
  };
  expect_job("--hosts a:1,b:1 --host-timeout-seconds 6", "echo ready; sleep 10; echo done",
             {.ready = 2, .act = stops_launcher, .out = {"[1@b] done"}, .seconds = 60});
}

TEST(LaunchHostsTest, RanksStartInTheLaunchersDirectory) {
  TestJobSetup setup = fake_hosts();
  setup.prefix = {"env", "-C", setup.directory};
  Job job(own_sh("--hosts a:1,localhost:1 --no-prefix", "pwd"), setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ::testing::ElementsAre(setup.directory, setup.directory));
}

TEST(LaunchHostsTest, ARankThatEndsWellEndsNobody) {
  expect_job("--hosts a:1,b:2", "[ $RANK = 2 ] || exit 0; sleep 0.3; echo done",
             {.start = kOwn, .lines = {"[2@b] done"}});
}

TEST(LaunchHostsFaultTest, AKilledWrapperIsNamed) {
  for (const std::string host : {"b", "a"}) {
    const auto kills_wrapper = [&](Job& job) {
      const auto wrappers = job.running("_rank", "FAKE_HOST", host);
      ASSERT_EQ(wrappers.size(), 1u);
      ::kill(wrappers[0], SIGKILL);
    };
    expect_job("--hosts a:1,b:1", kWait,
               {.start = kOwn,
                .ready = 2,
                .act = kills_wrapper,
                .code = 137,
                .err = {"(host " + host + ", pid ", "wrapper"},
                .seconds = 8,
                .clean_seconds = 8});
  }
}

}  // namespace
}  // namespace lockstep::launcher
