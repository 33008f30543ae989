// Jobs on several hosts that lose some of them, continue on the rest, and grow back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

#include "base/json_value.h"
#include "base/text.h"
#include "tests/launcher/hosts/fake_hosts.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// `say` reports; `wait_for NAME` waits for a file beside the job; `attempt N` is true in that one.
const std::string kWords =
    "say() { echo \"$@\" >&$LOCKSTEP_STATUS_FD; }\n"
    "wait_for() { until [ -e $TMPDIR/../$1 ]; do sleep 0.02; done; }\n"
    "attempt() { [ $LOCKSTEP_ATTEMPT = $1 ]; }\n"
    "size=${WORLD_SIZE-$OMPI_COMM_WORLD_SIZE}\n"
    "echo attempt $LOCKSTEP_ATTEMPT: $rank of $size on ${FAKE_HOST-own}\n";
// To lose host b: its helper is the parent of the wrapper.
const std::string kLosesB = "[ $FAKE_HOST = b ] && kill -KILL $(ps -o ppid= -p $PPID)";
const std::string kForEver = "\necho ready; while :; do sleep 0.02; done";

std::vector<nlohmann::json> history(const Job& job, const std::string& event) {
  std::vector<nlohmann::json> events;
  std::ifstream file(job.directory() + "/logs/restarts.jsonl");
  for (std::string line; std::getline(file, line);)
    if (auto one = parse_json(line, 2); one["event"] == event) events.push_back(std::move(one));
  return events;
}
void signal_file(const Job& job, const std::string& name) { std::ofstream(job.directory() + "/" + name) << "yes"; }
auto kills_host(const char* host, bool stays_down) {
  return [=](Job& job) { kill_host(job, host, stays_down); };
}

/// Ranks of the launcher's own binary, unless the outcome says more.
void expect_restarts(const std::string& flags, const std::string& script, JobOutcome outcome) {
  if (outcome.start == kMpirun) outcome.start = kOwn;
  if (outcome.clean_seconds == 0) outcome.clean_seconds = 8;
  expect_job(flags + " --log-dir {}/logs", kWords + script, outcome);
}

TEST(HostRestartTest, ALostHostIsLeftOutAndTheOthersHelpersStay) {
  const auto loses_b = [](Job& job) {
    const pid_t helper = helper_on(job, "a");
    kill_host(job, "b", true);
    ASSERT_TRUE(job.says("attempt 1: 1 of 2 on own")) << job.out() << job.err();
    EXPECT_EQ(helper_on(job, "a"), helper);
    signal_file(job, "go");
  };
  const auto is_told = [](const Job& job) {
    const auto restarts = history(job, "restart");
    ASSERT_EQ(restarts.size(), 1u);
    EXPECT_EQ(restarts[0]["exit_code"], 4);
    EXPECT_EQ(restarts[0]["ranks"], 2);
    EXPECT_EQ(restarts[0]["from_step"], 20);
    EXPECT_EQ(history(job, "resumed").size(), 1u);
    std::ifstream log(job.directory() + "/logs/rank-0.log");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}),
              "attempt 0: 0 of 4 on a\nready\nattempt 1: 0 of 2 on a\n");
  };
  expect_restarts("--hosts a:1,b:2,localhost:1 --max-restarts 3 --min-ranks 1",
                  "attempt 1 && { wait_for go; [ $rank = 0 ] && { say progress 21; say done; }; exit 0; }\n"
                  "[ $rank = 0 ] && { say checkpointed 20; say progress 23; }" +
                      kForEver,
                  {.start = kBoth,
                   .ready = 4,
                   .act = loses_b,
                   .out = {"] attempt 1: 0 of 2 on a\n"},
                   .err = {"restart 1 of 3: host b (ranks 1 and 2) was lost: the connection to it ended ",
                           "; from the checkpoint of step 20 on 2 ranks, 3 steps and "},
                   .then = is_told});
}

TEST(HostRestartTest, TheFirstHostMayBeTheOne) {
  expect_restarts("--hosts a:1,b:2 --max-restarts 3 --min-ranks 1",
                  "attempt 1 && { echo checkpoint $LOCKSTEP_CHECKPOINT_STEP; exit 0; }\n"
                  "[ $rank = 0 ] && say checkpointed 20; echo before $LOCKSTEP_CHECKPOINT_STEP" +
                      kForEver,
                  {.ready = 3,
                   .act = kills_host("a", true),
                   .out = {"[0@b] attempt 1: 0 of 2 on b\n", "[1@b] checkpoint 20\n", "[0@a] before 0\n"},
                   .err = {"host a (rank 0) was lost"}});
}

TEST(HostRestartTest, AHostThatAnswersAgainAtOnceKeepsItsRanks) {
  expect_restarts("--hosts a:1,b:1 --max-restarts 3 --min-ranks 1", "attempt 1 && exit 0" + kForEver,
                  {.ready = 2, .act = kills_host("b", false), .out = {"[1@b] attempt 1: 1 of 2 on b\n"}});
}

TEST(HostRestartTest, ARankThatFailsLeavesAllHelpersAlone) {
  const auto looks = [](Job& job) {
    ASSERT_TRUE(job.says("[0@a] ready")) << job.err();
    const pid_t a = helper_on(job, "a"), b = helper_on(job, "b");
    signal_file(job, "go0");
    ASSERT_TRUE(job.says("[1@b] attempt 1: 1 of 2 on b")) << job.err();
    EXPECT_EQ(helper_on(job, "a"), a);
    EXPECT_EQ(helper_on(job, "b"), b);
    signal_file(job, "go");
  };
  expect_restarts(
      "--hosts a:1,b:1 --max-restarts 3",
      "attempt 1 && { wait_for go; exit 0; }; attempt 0 && [ $rank = 1 ] && { wait_for go0; exit 9; }" + kForEver,
      {.act = looks});
}

// Hosts that have returned take part after the next checkpoint, whatever ranks do when they are asked to end.
TEST(HostRestartTest, TheJobGrowsBackAtTheNextCheckpoint) {
  const auto loses_b_for_a_while = [](Job& job) {
    kill_host(job, "b", true);
    ASSERT_TRUE(job.says("attempt 1: 0 of 1 on a")) << job.err();
    let_return(job, "b");
    const auto deadline = Deadline::after_seconds(30);
    while (helper_on(job, "b") < 0 && !deadline.expired()) std::this_thread::sleep_for(Millis(20));
    std::this_thread::sleep_for(Millis(500));
    EXPECT_THAT(job.out(), Not(HasSubstr("attempt 2"))) << "before the checkpoint";
    signal_file(job, "go");
  };
  const auto has_grown = [](const Job& job) {
    const auto grown = history(job, "grow");
    ASSERT_EQ(grown.size(), 1u);
    EXPECT_EQ(grown[0]["ranks"], 3);
    EXPECT_EQ(history(job, "restart").size(), 1u) << "growing is no restart after a failure";
  };
  for (const std::string trap : {"trap 'say checkpointed 31; exit 75' TERM", "trap - TERM"})
    expect_restarts(
        "--hosts a:1,b:2 --max-restarts 1 --min-ranks 1",
        "attempt 2 && exit 0; attempt 1 && " + trap +
            "\nattempt 0 && say checkpointed 20; attempt 1 && { say checkpointed 20; say progress 21; wait_for go; "
            "say progress 30; say checkpointed 30; }" +
            kForEver,
        {.ready = 3,
         .act = loses_b_for_a_while,
         .out = {"[0@a] attempt 2: 0 of 3 on a\n", "[1@b] attempt 2: 1 of 3 on b\n", "[2@b] attempt 2: 2 of 3 on b\n"},
         .err = {"the job grows: hosts have returned; from the checkpoint of step 3"},
         .then = has_grown});
}

TEST(HostRestartTest, ASpareHostTakesOver) {
  const auto loses_a = [](Job& job) {
    EXPECT_GT(helper_on(job, "c"), 0);
    kill_host(job, "a", true);
  };
  expect_restarts(
      "--hosts a:1,b:1,c:1 -n 2 --max-restarts 3", "attempt 1 && exit 0" + kForEver,
      {.ready = 2, .act = loses_a, .out = {"[0@b] attempt 1: 0 of 2 on b\n", "[1@c] attempt 1: 1 of 2 on c\n"}});
}

TEST(HostRestartTest, WithTooFewHostsItWaitsForThem) {
  const auto loses_b_until_it_waits = [](Job& job) {
    kill_host(job, "b", true);
    ASSERT_TRUE(
        job.says("waiting for hosts, for up to 600 s: the hosts that answer have 1 slot, and the job needs 2 at "
                 "least (host b: "))
        << job.err();
    let_return(job, "b");
  };
  expect_restarts("--hosts a:1,b:1 --max-restarts 3", "attempt 1 && exit 0" + kForEver,
                  {.ready = 2, .act = loses_b_until_it_waits, .out = {"[1@b] attempt 1: 1 of 2 on b\n"}});
}

TEST(HostRestartTest, TheWaitEndsWithTheReason) {
  const auto is_told = [](const Job& job) { EXPECT_EQ(history(job, "end").at(0)["exit_code"], 4); };
  expect_restarts("--hosts a:1,b:1 --max-restarts 3 --host-return-seconds 0.5", kForEver,
                  {.ready = 2,
                   .act = kills_host("b", true),
                   .code = 4,
                   .err = {"not restarted: the hosts that answer have 1 slot, and the job needs 2 at least (host "
                           "b: there is no route to it"},
                   .then = is_told});
}

TEST(HostRestartTest, AStopEndsTheWait) {
  const auto asks_while_it_waits = [](Job& job) {
    kill_host(job, "b", true);
    ASSERT_TRUE(job.says("waiting for hosts")) << job.err();
    job.send(SIGTERM);
  };
  expect_restarts("--hosts a:1,b:1 --max-restarts 3", kForEver,
                  {.ready = 2,
                   .act = asks_while_it_waits,
                   .code = 143,
                   .err = {"stopped by SIGTERM before restart 1"},
                   .seconds = 8});
}

TEST(HostRestartTest, RepeatedLossWithoutProgressEndsTheJob) {
  expect_restarts("--hosts a:1,b:1 --max-restarts 100", kLosesB + kForEver,
                  {.code = 4, .err = {"not restarted: no further step and no newer checkpoint"}});
}

TEST(HostRestartTest, RepeatedlyLostHostStaysOut) {
  const auto twice = [](const Job& job) { EXPECT_EQ(history(job, "restart").size(), 2u); };
  expect_restarts("--hosts a:1,b:1 --max-restarts 100 --min-ranks 1", "[ $size = 1 ] && exit 0; " + kLosesB + kForEver,
                  {.then = twice});
}

TEST(HostRestartTest, RanksOnAllHostsOutliveAnotherOne) {
  for (const char* dies : {"0", "1", "3"})
    expect_restarts("--hosts a:1,b:2,localhost:1 --max-restarts 3 --in-place",
                    kNextPlace + "say rejoins; echo process $$\n" + "if attempt 0; then sleep 0.3; [ $rank = " + dies +
                        " ] && kill -KILL $$; next 7; echo continues $LOCKSTEP_ATTEMPT as $RANK of $WORLD_SIZE; fi\n"
                        "say progress 8; sleep 0.2; say done",
                    {.err = {std::string("restart 1 of 3 in place: rank ") + dies + " of 4 (host ",
                             std::string("; the job continues after step 7 with rank ") + dies + " started again"},
                     .not_err = {"left out", "the last lines"},
                     .then = [&](const Job& job) {
                       std::size_t went_on = 0;
                       for (const char* rank : {"0", "1", "2", "3"})
                         went_on +=
                             job.out().find(std::string("continues 1 as ") + rank + " of 4") != std::string::npos;
                       EXPECT_EQ(went_on, 3u) << job.out();
                     }});
}

TEST(HostRestartTest, ARankElsewhereThatTheOthersWaitForInVainIsReplaced) {
  expect_restarts("--hosts a:1,b:1 --max-restarts 3 --in-place",
                  kNextPlace +
                      "say rejoins; attempt 1 && { say progress 3; exit 0; }\n"
                      "[ $rank = 1 ] && sleep 100\nsleep 0.3; next 2; say progress 3",
                  {.err = {"restart 1 of 3 in place: rank 1 of 2 (host b", "held up the others",
                           "the job continues after step 2 with rank 1 started again"}});
}

TEST(HostRestartTest, ALostHostIsNotReplacedInPlace) {
  expect_restarts("--hosts a:1,b:2 --max-restarts 3 --min-ranks 1 --in-place",
                  kNextPlace + "say rejoins; attempt 1 && exit 0\n" + kLosesB + "\nsleep 0.5; next 2; exit 4",
                  {.err = {"restart 1 of 3", ": host b (rank"}, .not_err = {"in place"}});
}

// Its network, its memory or its devices may be broken, although it answers.
TEST(HostRestartTest, AHostWhoseRanksFailAgainIsLeftOut) {
  expect_restarts("--hosts a:2,b:1,c:1 --max-restarts 100 --min-ranks 2",
                  "[ $FAKE_HOST = a ] && exit 4; [ $size = 2 ] && exit 0" + kForEver,
                  {.out = {"attempt 2: 0 of 2 on b\n", "attempt 2: 1 of 2 on c\n"},
                   .err = {"host a is left out for now: its ranks were the cause of a failure without progress"}});
}

// At its first failure, although it answers, and for good. Whoever notices it first is not to blame.
TEST(HostRestartTest, AHostThatComputesWronglyIsLeftOut) {
  expect_restarts(
      "--hosts a:1,b:1,c:1 --max-restarts 3 --min-ranks 2",
      "attempt 1 && exit 0; say progress 7; [ $FAKE_HOST = a ] && { say computes wrongly; wait_for go; exit 4; }\n"
      "[ $FAKE_HOST = b ] && { sleep 0.5; > $TMPDIR/../go; exit 4; }" +
          kForEver,
      {.out = {"attempt 1: 0 of 2 on b\n", "attempt 1: 1 of 2 on c\n"},
       .err = {"host a is left out from now on: rank 0 has computed wrongly there",
               "restart 1 of 3 in 0.25 s: rank 0 of 3 (host a, pid ", "has computed wrongly: it exited with"}});
  expect_restarts(
      "--hosts a:1,b:1 --max-restarts 3",
      "attempt 1 && exit 0; say progress 7; [ $FAKE_HOST = a ] && { say computes wrongly; exit 4; }" + kForEver,
      {.out = {"attempt 1: 0 of 2 on a\n"},
       .err = {"rank 0, which has computed wrongly, starts again on the same host", "--min-ranks"}});
}

TEST(HostRestartTest, AHostThatFallsSilentIsLeftOut) {
  const auto stops_b = [](Job& job) {
    signal_file(job, "down-b");
    ::kill(helper_on(job, "b"), SIGSTOP);
  };
  expect_restarts("--hosts a:1,b:1 --max-restarts 3 --min-ranks 1 --host-timeout-seconds 6",
                  "attempt 1 && exit 0" + kForEver,
                  {.ready = 2,
                   .act = stops_b,
                   .out = {"[0@a] attempt 1: 0 of 1 on a\n"},
                   .err = {"restart 1 of 3 in 0.25 s: host b (rank 1) was lost: it was last heard from "}});
}

TEST(HostRestartTest, NothingIsLeftWhereTheLauncherIsKilledInALaterAttempt) {
  const auto kills_it_then = [](Job& job) {
    ASSERT_TRUE(job.says("[0@a] ready")) << job.err();
    signal_file(job, "go");
    ASSERT_TRUE(job.says("[1@b] ready")) << job.err();
    job.send(SIGKILL);
  };
  expect_restarts("--hosts a:1,b:1 --max-restarts 3",
                  "trap '' TERM; attempt 1 || [ $rank = 0 ] || { wait_for go; exit 9; }" + kForEver,
                  {.act = kills_it_then, .code = 137});
}

// Helpers would end a job whose launcher is silent.
TEST(HostRestartTest, AHelperOutlivesALongPause) {
  const auto looks = [](Job& job) {
    ASSERT_TRUE(job.says("restart 1 of 100")) << job.err();
    EXPECT_GT(helper_on(job, "a"), 0);
    ASSERT_TRUE(job.says("restart 6 of 100 in 8 s")) << job.err();
  };
  expect_restarts(
      "--hosts a:1,b:1 --max-restarts 100 --host-timeout-seconds 6",
      "[ $LOCKSTEP_ATTEMPT = 6 ] && exit 0; say progress $LOCKSTEP_ATTEMPT; [ $rank = 0 ] || exit 9" + kForEver,
      {.act = looks, .not_err = {"was lost"}});
}

TEST(HostRestartTest, WrongFlagsAreRefused) {
  for (const auto& [flags, says] : std::vector<std::pair<std::string, std::string>>{
           {"--hosts a:1,b:1 --host-return-seconds 5", "--host-return-seconds is for jobs on several hosts that are"},
           {"-n 2 --max-restarts 1 --host-return-seconds 5", "--host-return-seconds is for jobs on several hosts that"},
           {"--hosts a:1 --max-restarts 1 --host-return-seconds -1", "a wait of -1 s for hosts"},
           {"--hosts a:1,b:1 --max-restarts 1 --min-ranks 3", "--min-ranks 3 of 2 ranks"}})
    expect_restarts(flags, "echo ran",
                    {.code = 2, .err = {says}, .then = [](const Job& job) { EXPECT_EQ(job.out(), ""); }});
}

}  // namespace
}  // namespace lockstep::launcher
