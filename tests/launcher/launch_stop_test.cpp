// How a job is asked to stop, and what its ranks say meanwhile.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/text.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What a rank says of itself: `report KIND [TEXT|RANKS|SECONDS]`.
const std::string kReport = std::string("report() { " LAUNCHER_TOOL " report \"$@\"; }\n");
// A rank that saves a checkpoint when asked to stop, which takes it this long.
std::string saves_in(const std::string& pieces_of_10_ms) {
  return "on_term() { i=0; while [ $i -lt " + pieces_of_10_ms +
         " ]; do i=$((i + 1)); sleep 0.01; done; echo saved; exit 75; }\n"
         "trap on_term TERM\necho ready\nwhile :; do sleep 0.01; done\n";
}

const std::vector<std::string> kBothSaved = {"[0] ready", "[0] saved", "[1] ready", "[1] saved"};

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// `timeout` signals the launcher, and then its group, in which it is too.
TEST(StopTest, TheSameSignalTwiceAtOnceIsOneRequest) {
  const auto asks_twice = [](Job& job) {
    job.send(SIGTERM);
    std::this_thread::sleep_for(Millis(50));
    job.send(SIGTERM);
  };
  expect_job("-n 2", saves_in("40"), {.ready = 2, .act = asks_twice, .code = 75, .lines = kBothSaved});
}

// As schedulers do that know the processes of a job.
TEST(StopTest, AllProcessesOfAJobMayGetTheSignal) {
  for (const bool launcher_last : {false, true}) {
    const auto asks_all = [&](Job& job) {
      if (!launcher_last) job.send(SIGTERM);
      for (const auto& process : job.processes())
        if (process.role != JobProcess::Role::kLauncher) ::kill(process.pid, SIGTERM);
      std::this_thread::sleep_for(Millis(20));
      if (launcher_last) job.send(SIGTERM);
    };
    expect_job(
        "-n 2 --grace-seconds 20", saves_in("150"),
        {.start = launcher_last ? kMpirun : kBoth, .ready = 2, .act = asks_all, .code = 75, .lines = kBothSaved});
  }
}

TEST(StopTest, RanksThatSaveACheckpointGetALongerGrace) {
  expect_job("-n 2",
             kReport +
                 "report defers 0\non_term() { sleep 2; report saving 'the checkpoint of step 7'; sleep 1; report "
                 "saved; exit 75; }\ntrap on_term TERM\necho ready\nwhile :; do sleep 0.01; done\n",
             {.ready = 2,
              .act = sends(SIGTERM),
              .code = 75,
              .err = {"waiting for ranks 0 and 1 to finish their steps and save a checkpoint, for up to 30 s",
                      "to write the checkpoint of step 7"}});
}

TEST(StopTest, LossAtTheEndOfTheGraceIsReported) {
  expect_job("-n 2 --grace-seconds 1",
             kReport + "report defers 0; trap '' TERM; echo ready; while :; do sleep 0.01; done",
             {.ready = 2,
              .act = sends(SIGTERM),
              .code = 143,
              .err = {"no longer waiting for ranks 0 and 1 to finish their steps", "--grace-seconds waits longer"}});
}

TEST(StopTest, AFailureWaitsForWhatIsBeingWritten) {
  expect_job("-n 2",
             kReport +
                 "[ $rank = 1 ] && { until [ -e $TMPDIR/../go ]; do sleep 0.01; done; exit 3; }\n"
                 "report saving 'the checkpoint of step 7'; trap '' TERM; : > $TMPDIR/../go; sleep 3; report saved; "
                 "echo saved; exit 4",
             {.code = 3, .out = {"[0] saved"}, .err = {"rank 1 of 2"}});
}

// A rank that computes and waits for nobody has nothing to report; a failure elsewhere ends it soon.
TEST(StopTest, AFailureDoesNotWaitForStepsThatCannotEnd) {
  expect_job("-n 2", kReport + "report defers 1000; trap '' TERM; echo ready; [ $rank = 0 ] || exit 3; sleep 1000",
             {.code = 3, .seconds = 20});
}

TEST(StopTest, AStoppedRankIsNamed) {
  const auto goes = [](Job& job) {
    ASSERT_TRUE(job.says("was stopped by SIGSTOP")) << job.err();
    std::ofstream(job.directory() + "/go") << "";
  };
  expect_job("-n 2",
             kReport +
                 "[ $rank = 1 ] && { kill -STOP $$; exit 0; }\n"
                 "until [ -e $TMPDIR/../go ]; do sleep 0.01; done; report missing 1; exit 5",
             {.act = goes,
              .code = 5,
              .err = {"rank 1 of 2", "held up the others: rank 0 waited for it in vain"},
              .not_err = {"failed first"}});
}

// As cpulimit does it.
TEST(StopTest, OneThatIsStoppedAgainAndAgainIsNamedOnce) {
  Job job(own_sh("-n 2",
                 "[ $RANK = 0 ] || exit 0; me=$$; ( for i in 1 2 3 4 5 6; do kill -STOP $me; sleep 0.1; "
                 "kill -CONT $me; sleep 0.1; done; : >$TMPDIR/../done ) & "
                 "until [ -e $TMPDIR/../done ]; do sleep 0.01; done"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  const std::string said = job.err(), line = "was stopped by SIGSTOP";
  const auto first = said.find(line);
  ASSERT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find(line, first + 1), std::string::npos) << said;
}

TEST(StopTest, AStopReachesARankThatIsStopped) {
  const auto asks = [](Job& job) {
    ASSERT_TRUE(job.says("was stopped by SIGSTOP")) << job.err();
    job.send(SIGTERM);
  };
  expect_job("-n 2",
             kReport +
                 "report defers 0; trap 'exit 75' TERM; echo ready; [ $rank = 0 ] && kill -STOP $$; "
                 "while :; do sleep 0.01; done",
             {.ready = 2, .act = asks, .code = 75});
}

TEST(StopTest, AUsageErrorIsSaidOnce) {
  const auto once = [](const Job& job) { EXPECT_EQ(count(job.err(), "no model nosuch"), 1u) << job.err(); };
  expect_job("-n 3", kReport + "report usage 'no model nosuch'; exit 2",
             {.code = 2, .err = {"] error: no model nosuch\n"}, .not_err = {"failed first"}, .then = once});
}

TEST(StopTest, DataOnStdoutHasNoPrefix) {
  expect_job("-n 2", kReport + "[ $rank = 0 ] && report data; echo \"{}\"; echo note >&2",
             {.err = {"[0] note\n"}, .lines = {"[1] {}", "{}"}});
}

// Descriptors that no launcher has given are left alone.
TEST(StopTest, GarbageInPlaceOfReportsIsDropped) {
  expect_job("-n 1",
             kReport + LAUNCHER_TOOL
                 " report garbage; LOCKSTEP_STATUS=1:2:3 report usage lost; LOCKSTEP_STATUS=x report "
                 "usage lost; echo still here",
             {.lines = {"[0] still here"}, .then = [](const Job& job) { EXPECT_EQ(job.err(), ""); }});
}

// The reader is there and reads nothing; a pipe holds 64 KiB.
TEST(StopTest, AStopDoesNotWaitForAReader) {
  const std::string directory = make_test_directory();
  const std::string blocked = fmt::format("mkfifo {0}/pipe; exec 9<>{0}/pipe; exec \"$0\" \"$@\" >{0}/pipe", directory);
  Job job(sh("-n 2", kReport + "report defers 0; trap 'echo saved >&2; exit 75' TERM\necho ready >&2\n"
                               "while :; do head -c 100000 /dev/zero | tr '\\0' x; echo; done"),
          {.prefix = {"/bin/sh", "-c", blocked}, .directory = directory});
  ASSERT_TRUE(job.says("[0] ready") && job.says("[1] ready")) << job.err();
  std::this_thread::sleep_for(Millis(500));
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(Deadline::after_seconds(20)), 75) << job.err();
  EXPECT_THAT(job.err(), AllOf(HasSubstr("[1] saved"), HasSubstr("of output were not read")));
  EXPECT_EQ(job.leftovers(), "");
}

TEST(StopTest, ClosedStdoutEndsTheJob) {
  const std::string directory = make_test_directory();
  const std::string unread =
      fmt::format("mkfifo {0}/pipe; exec 9<>{0}/pipe 8>{0}/pipe 9<&-; exec \"$0\" \"$@\" >&8 8>&-", directory);
  for (const std::string script :
       {"trap 'exit 75' TERM; while :; do echo line; sleep 0.01; done", "echo line; exit 0"}) {
    std::filesystem::remove(directory + "/pipe");
    Job job(sh("-n 2", kReport + script), {.prefix = {"/bin/sh", "-c", unread}});
    EXPECT_EQ(job.wait(), 128 + SIGPIPE) << job.err();
    EXPECT_THAT(job.err(), HasSubstr("nobody reads standard output any more"));
    EXPECT_EQ(job.leftovers(), "");
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace lockstep::launcher
