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

const std::string kRankIs1 = "[ $OMPI_COMM_WORLD_RANK = 1 ]";

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
  TestJobSetup setup;
  setup.environment.emplace_back("LD_PRELOAD", "");
  Job job(sh("-n 1 --no-prefix", "echo \"[${LD_PRELOAD-none}] ${LOCKSTEP_PRELOAD-none}\""), setup);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[none] none\n");
}

TEST(LaunchTest, EveryRankRunsAndItsLinesArePrefixed) {
  Job job(sh("-n 2", "echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, $LOCKSTEP_BIND; echo oops >&2"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ::testing::ElementsAre("[0] rank 0 of 2, core", "[1] rank 1 of 2, core"));
  EXPECT_THAT(sorted_lines(job.err()), ::testing::ElementsAre("[0] oops", "[1] oops"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchTest, ExitCodesPassThrough) {
  for (const int code : {1, 2, 3, 5, 7, 42, 75, 255}) {
    Job job(sh("-n 2", kRankIs1 + " && exit " + std::to_string(code) + "; exec sleep 100"));
    EXPECT_EQ(job.wait(), code);
    // 75 is no failure: the rank was asked to stop, and will resume later.
    EXPECT_THAT(job.err(), HasSubstr(code == 75 ? "stopped on request, after saving a checkpoint" : "rank 1 of 2"));
    EXPECT_EQ(job.leftovers(), "");
  }
}

TEST(LaunchTest, SignalsAreNamed) {
  Job job(sh("-n 2", kRankIs1 + " && kill -SEGV $$; exec sleep 100"));
  EXPECT_EQ(job.wait(), 128 + SIGSEGV);
  EXPECT_THAT(job.err(), HasSubstr("SIGSEGV"));
}

TEST(LaunchTest, TheFirstFailureIsNamedWithItsLastLines) {
  Job job(sh("-n 3",
             "trap 'echo I was asked; exit 9' TERM; ready=$TMPDIR/../ready; : > $ready$OMPI_COMM_WORLD_RANK\n"
             "until [ -e ${ready}0 ] && [ -e ${ready}1 ] && [ -e ${ready}2 ]; do sleep 0.01; done\n" +
                 kRankIs1 + " && { echo about to fail; exit 6; }\nwhile :; do sleep 0.01; done"));
  EXPECT_EQ(job.wait(), 6);
  EXPECT_THAT(job.err(), HasSubstr("rank 1 of 3"));
  EXPECT_THAT(job.err(), HasSubstr("  | about to fail\n"));
  EXPECT_THAT(job.out(), HasSubstr("[0] I was asked\n"));
  EXPECT_THAT(job.out(), HasSubstr("[2] I was asked\n"));
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
  std::vector<std::string> arguments = {"-n", "1", "--no-prefix", "--", "printf", "<%s>"};
  arguments.insert(arguments.end(), odd.begin(), odd.end());
  Job job(arguments);
  EXPECT_EQ(job.wait(), 0) << job.err();
  std::string expected;
  for (const auto& argument : odd) expected += "<" + argument + ">";
  EXPECT_EQ(job.out(), expected + "\n");
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
    Job job(sh("-n 2 --log-dir " + logs, "echo out $OMPI_COMM_WORLD_RANK; " + kRankIs1 +
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

TEST(LaunchTest, BackgroundProcessesEndWithTheJob) {
  Job job(sh("-n 2", "setsid sleep 100 & sleep 100 & exit 0"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchTest, UserSignalsReachThePrograms) {
  Job job(sh("-n 2", "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  job.send(SIGUSR1);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()), ::testing::ElementsAre("[0] got it", "[0] ready", "[1] got it", "[1] ready"));
}

TEST(LaunchTest, StopsPassTheSignalOnAndReturnIt) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    Job job(sh("-n 2", "trap 'echo asked; exit 1' INT TERM HUP; echo ready; while :; do sleep 0.01; done"));
    ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
    job.send(number);
    EXPECT_EQ(job.wait(), 128 + number);
    EXPECT_THAT(job.out(), HasSubstr("[1] asked"));
    EXPECT_EQ(job.leftovers(), "");
  }
}

TEST(LaunchTest, ACheckpointOnRequestIsReported) {
  Job job(sh("-n 2", "trap 'exit 75' TERM; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(), 75);
}

TEST(LaunchTest, ASecondStopDoesNotWaitForTheGrace) {
  Job job(sh("-n 2 --grace-seconds 1000", "trap '' INT TERM; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  job.send(SIGINT);
  ASSERT_EQ(job.wait(Deadline::after_seconds(1.5)), -1);  // closer together they are one request
  job.send(SIGINT);
  EXPECT_EQ(job.wait(), 130);
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchTest, AMpiProgramThatAborts) {
  Job job({"-n", "2", "--", MPI_LEAVE_PROGRAM, "abort"});
  EXPECT_EQ(job.wait(), 17) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 of 2"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchTest, AnMpiProgramThatLeavesWithoutFinalize) {
  Job job({"-n", "2", "--", MPI_LEAVE_PROGRAM, "exit"});
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 of 2"));
  EXPECT_THAT(job.err(), HasSubstr("MPI_Finalize"));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(LaunchTest, StoppingMpirunLeavesTheRanksTheirGrace) {
  Job job(sh("-n 2 --grace-seconds 20",
             "trap 'sleep 2.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  ASSERT_EQ(::kill(job.find(JobProcess::Role::kMpirun).pid, SIGTERM), 0);
  job.wait();
  EXPECT_THAT(sorted_lines(job.out()), ::testing::ElementsAre("[0] ready", "[0] saved", "[1] ready", "[1] saved"));
  EXPECT_EQ(job.leftovers(), "");
}

}  // namespace
}  // namespace lockstep::launcher
