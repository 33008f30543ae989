// The launcher as its users see it: exit codes, output, bad input. Deaths are in launch_fault_test.cpp.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "tests/launcher/job.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::launcher {
namespace {

using ::testing::HasSubstr;

const std::string kRankIs1 = "[ $rank = 1 ]", kLoop = "while :; do sleep 0.01; done";

/// The addresses at which `pid` listens, as the kernel writes them in hexadecimal.
std::vector<std::string> listens_at(pid_t pid) {
  std::vector<std::string> inodes, addresses;
  std::error_code gone;
  for (const auto& fd : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), gone)) {
    const auto target = std::filesystem::read_symlink(fd.path(), gone).string();
    if (target.starts_with("socket:[")) inodes.push_back(target.substr(8, target.size() - 9));
  }
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::vector<std::string> fields(std::istream_iterator<std::string>(words), {});
      constexpr const char* kListens = "0A";
      if (fields.size() > 9 && fields[3] == kListens && std::ranges::find(inodes, fields[9]) != inodes.end())
        addresses.push_back(fields[1].substr(0, fields[1].find(':')));
    }
  }
  return addresses;
}

// Neither mpirun's ports nor those of ranks that use MPI are for other hosts, where the job has but one.
TEST(LaunchTest, OneHostsPortsAreLoopbacks) {
  Job job({"-n", "2", "--", MPI_SPIN_PROGRAM});
  const JobProcess mpirun = job.find(JobProcess::Role::kMpirun);
  ASSERT_GT(mpirun.pid, 0);
  for (const int rank : {0, 1}) ASSERT_GT(job.find(JobProcess::Role::kProgram, rank).pid, 0);
  bool any = false;
  for (int i = 0; i < 30; ++i) {  // MPI_Init takes a while
    for (const auto& process : job.processes())
      for (const auto& address : listens_at(process.pid)) {
        any = true;
        EXPECT_TRUE(address == "0100007F" || address == "00000000000000000000000001000000")
            << address << " in " << static_cast<int>(process.role);
      }
    std::this_thread::sleep_for(Millis(100));
  }
  EXPECT_TRUE(any);  // mpirun does listen
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(), 143);
}

TEST(LaunchTest, PreloadsOfMpirunAreNotInRanks) {
  expect_job("-n 1 --no-prefix", "echo \"[${LD_PRELOAD-none}] ${LOCKSTEP_PRELOAD-none}\"",
             {.lines = {"[none] none"}, .environment = {{"LD_PRELOAD", ""}}});
}

TEST(LaunchTest, EveryRankRunsAndItsLinesArePrefixed) {
  expect_job("-n 2", "echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, $LOCKSTEP_BIND; echo oops >&2",
             {.lines = {"[0] rank 0 of 2, core", "[1] rank 1 of 2, core"}, .err_lines = {"[0] oops", "[1] oops"}});
}

TEST(LaunchTest, NoMpirunIsNeeded) {
  // Nothing but a shell's own words: there is no PATH.
  expect_job("-n 2",
             "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $LOCKSTEP_BIND $LOCKSTEP_ATTEMPT; "
             "echo ${OMPI_COMM_WORLD_RANK-none} >&2",
             {.start = kOwn,
              .lines = {"[0] 0 of 2, 0 of 2, core 0", "[1] 1 of 2, 1 of 2, core 0"},
              .err_lines = {"[0] none", "[1] none"},
              .environment = {{"PATH", "/nowhere"}}});
}

TEST(LaunchTest, WithTheFlagOwnRanksRunUnderMpirun) {
  expect_job("-n 2 --mpi", "echo ${OMPI_COMM_WORLD_RANK-none}", {.start = kOwn, .lines = {"[0] 0", "[1] 1"}});
}

TEST(LaunchTest, SevenRanksAndTheirLogs) {
  const auto are_there = [](const Job& job) {
    for (int i = 0; i < 7; ++i)
      EXPECT_EQ(first_line(fmt::format("{}/logs/rank-{}.log", job.directory(), i)), fmt::format("I am {}", i));
  };
  expect_job("-n 7 --log-dir {}/logs", "echo I am $RANK", {.start = kOwn, .then = are_there});
}

TEST(LaunchTest, ARankThatEndsWellEndsNobody) {
  expect_job("-n 3", "[ $RANK = 0 ] && exit 0; sleep 0.3; echo done",
             {.start = kOwn, .lines = {"[1] done", "[2] done"}});
}

TEST(LaunchTest, SignalsAreNamed) {
  expect_job("-n 2", kRankIs1 + " && { echo about to fail; kill -SEGV $$; }; exec sleep 100",
             {.start = kBoth, .code = 128 + SIGSEGV, .err = {"rank 1 of 2", "SIGSEGV", "  | about to fail\n"}});
}

TEST(LaunchTest, TheFirstFailureIsNamedWithItsLastLines) {
  expect_job("-n 3",
             "trap 'echo I was asked; exit 9' TERM; ready=$TMPDIR/../ready; : > $ready$rank\n"
             "until [ -e ${ready}0 ] && [ -e ${ready}1 ] && [ -e ${ready}2 ]; do sleep 0.01; done\n" +
                 kRankIs1 + " && { echo about to fail; exit 6; }\n" + kLoop,
             {.start = kBoth,
              .code = 6,
              .out = {"[0] I was asked\n", "[2] I was asked\n"},
              .err = {"rank 1 of 3", "  | about to fail\n"}});
}

TEST(LaunchTest, BackgroundProcessesEndWithTheJob) { expect_job("-n 2", "setsid sleep 100 & sleep 100 & exit 0", {}); }

TEST(LaunchTest, UserSignalsReachThePrograms) {
  expect_job("-n 2", "trap 'echo got it; exit 0' USR1; echo ready; " + kLoop,
             {.ready = 2, .act = sends(SIGUSR1), .lines = {"[0] got it", "[0] ready", "[1] got it", "[1] ready"}});
}

TEST(LaunchTest, ACheckpointOnRequestIsReported) {
  expect_job("-n 2", "trap 'exit 75' TERM; echo ready; " + kLoop, {.ready = 2, .act = sends(SIGTERM), .code = 75});
}

TEST(LaunchTest, ASecondStopDoesNotWaitForTheGrace) {
  const auto asks_twice = [](Job& job) {
    job.send(SIGINT);
    ASSERT_EQ(job.wait(Deadline::after_seconds(1.5)), -1);  // closer together they are one request
    job.send(SIGINT);
  };
  expect_job("-n 2 --grace-seconds 1000", "trap '' INT TERM; echo ready; " + kLoop,
             {.ready = 2, .act = asks_twice, .code = 130});
}

TEST(LaunchTest, AMpiProgramThatAborts) {
  expect_job("-n 2", "", {.code = 17, .err = {"rank 1 of 2"}, .program = {MPI_LEAVE_PROGRAM, "abort"}});
}

TEST(LaunchTest, AnMpiProgramThatLeavesWithoutFinalize) {
  expect_job("-n 2", "", {.code = 143, .err = {"rank 1 of 2", "MPI_Finalize"}, .program = {MPI_LEAVE_PROGRAM, "exit"}});
}

TEST(LaunchTest, StoppingMpirunLeavesTheRanksTheirGrace) {
  const auto stops_mpirun = [](Job& job) { ASSERT_EQ(::kill(job.find(JobProcess::Role::kMpirun).pid, SIGTERM), 0); };
  expect_job("-n 2 --grace-seconds 20", "trap 'sleep 2.5; echo saved; exit 0' TERM; echo ready; " + kLoop,
             {.ready = 2,
              .act = stops_mpirun,
              .code = kAnyCode,
              .lines = {"[0] ready", "[0] saved", "[1] ready", "[1] saved"}});
}

TEST(LaunchTest, ExitCodesPassThrough) {
  for (const int code : {1, 2, 3, 4, 5, 7, 42, 75, 255}) {
    SCOPED_TRACE(code);
    // 75 is no failure: the rank was asked to stop, and will resume later.
    JobOutcome outcome = {.code = code,
                          .err = {code == 75 ? "stopped on request, after saving a checkpoint" : "rank 1 of 2"}};
    const std::string script = kRankIs1 + " && exit " + std::to_string(code) + "; exec sleep 100";
    expect_job("-n 2", script, outcome);
    outcome.start = kOwn;
    outcome.not_err = {"mpirun"};
    expect_job("-n 2", script, outcome);
  }
}

TEST(LaunchTest, StopsPassTheSignalOnAndReturnIt) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP})
    expect_job("-n 2", "trap 'echo asked; exit 1' INT TERM HUP; echo ready; " + kLoop,
               {.start = kBoth, .ready = 2, .act = sends(number), .code = 128 + number, .out = {"[1] asked"}});
}

TEST(LaunchTest, ProgramsThatCannotStart) {
  Job missing({"-n", "2", "--", "no-such-program"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_THAT(missing.err(), HasSubstr("cannot start no-such-program: No such file or directory"));
  Job data({"-n", "2", "--", "/etc/passwd"});
  EXPECT_EQ(data.wait(), 126);
  Job none({"-n", "2", "--"});
  EXPECT_EQ(none.wait(), 2);
  Job negative({"-n", "-2", "--", "true"});
  EXPECT_EQ(negative.wait(), 2);
}

TEST(LaunchTest, ArgumentsArriveAsTheyAre) {
  const std::vector<std::string> odd = {"",   ":",  ":\\",        "a b",      "\"q\"", "$HOME",
                                        "-n", "--", "two\nlines", "\xff\xfe", "é"};
  for (std::vector<std::string> program : {std::vector<std::string>{"printf"}, {"lockstep", "run", "printf"}}) {
    program.push_back("<%s>");
    program.insert(program.end(), odd.begin(), odd.end());
    std::string expected;
    for (const auto& argument : odd) expected += "<" + argument + ">";
    const auto comes_out = [&](const Job& job) { EXPECT_EQ(job.out(), expected + "\n"); };
    expect_job("-n 1 --no-prefix", "", {.then = comes_out, .program = program});
  }
}

TEST(LaunchTest, LongLinesBinaryBytesAndMissingNewlines) {
  for (const int ranks : {3, 7}) {
    const std::string script =
        "head -c 300000 /dev/zero | tr '\\0' $OMPI_COMM_WORLD_RANK; echo; printf 'a\\000\\377b\\r\\n'; printf end";
    Job job(sh("-n " + std::to_string(ranks), script));
    ASSERT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.err(), HasSubstr("ranks share"));
    std::vector<std::string> expected;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string prefix = fmt::format("[{}] ", rank);
      expected.push_back(prefix + std::string(300000, static_cast<char>('0' + rank)));
      expected.push_back(prefix + std::string("a\0\xff"
                                              "b\r",
                                              5));
      expected.push_back(prefix + "end");
    }
    std::sort(expected.begin(), expected.end());
    EXPECT_TRUE(sorted_lines(job.out()) == expected) << job.out().size() << " bytes came out";
    EXPECT_EQ(job.leftovers(), "");
  }
}

TEST(LaunchTest, LogFilesHoldWhatEachRankWrote) {
  const lockstep::testing::TemporaryDirectory temporary;
  const std::string directory = temporary.path();
  {
    const std::string logs = directory + "/new";
    Job job(sh("-n 2 --log-dir " + logs, "echo out $OMPI_COMM_WORLD_RANK; rank=$OMPI_COMM_WORLD_RANK; " + kRankIs1 +
                                             " || exit 0; until grep -q out " + logs +
                                             "/rank-0.log; do sleep 0.01; done; exit 3"));
    EXPECT_EQ(job.wait(), 3);
    EXPECT_THAT(job.err(), HasSubstr("its log is " + directory + "/new/rank-1.log"));
    std::ifstream log(directory + "/new/rank-0.log");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}), "out 0\n");
  }
  Job job({"-n", "1", "--log-dir", "/proc/no/such", "--", "true"});
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.err(), HasSubstr("--log-dir"));
}

}  // namespace
}  // namespace lockstep::launcher
