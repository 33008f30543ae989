// Jobs that fail and are started again, as their users see them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iterator>

#include "base/json_value.h"
#include "base/text.h"
#include "tests/launcher/job.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Reports, as any program may.
const std::string kSay = "say() { echo \"$@\" >&$LOCKSTEP_STATUS_FD; }\n";

const std::string kLogs = " --log-dir {}/logs";

std::vector<nlohmann::json> history(const Job& job) {
  std::vector<nlohmann::json> events;
  std::ifstream file(job.directory() + "/logs/restarts.jsonl");
  for (std::string line; std::getline(file, line);) events.push_back(parse_json(line, 2));
  return events;
}
std::vector<std::string> restart_lines(const Job& job) {
  auto lines = split(job.err(), '\n');
  std::erase_if(lines, [](const auto& line) { return line.find("lockstep: restart ") != 0; });
  return lines;
}
auto has_restarts(std::size_t count) {
  return [count](const Job& job) { EXPECT_EQ(restart_lines(job).size(), count) << job.err(); };
}

TEST(RestartTest, AFailureIsRestartedFromTheCheckpointThatWasReported) {
  const auto is_told = [](const Job& job) {
    has_restarts(1)(job);
    EXPECT_THAT(
        restart_lines(job).at(0),
        AllOf(HasSubstr("restart 1 of 3: rank 1 of 2 (host "), HasSubstr("it was ended by SIGKILL"),
              HasSubstr("; from the checkpoint of step 10 on 2 ranks, 2 steps and "), HasSubstr(" s are lost")));
    // The same files continue.
    std::ifstream log(job.directory() + "/logs/rank-0.log");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}), "attempt 0\nattempt 1\n");
    const auto events = history(job);
    ASSERT_EQ(events.size(), 4u);
    EXPECT_EQ(events[0]["event"], "start");
    const auto restart = parse_json(
        R"({"event": "restart", "attempt": 1, "exit_code": 137, "rank": 1, "from_step": 10, "lost_steps": 2})", 2);
    for (const auto& [key, value] : restart.items()) EXPECT_EQ(events[1][key], value) << key;
    EXPECT_EQ(events[2]["event"], "resumed");
    EXPECT_EQ(events[2]["step"], 11);
    EXPECT_EQ(events[3]["event"], "end");
    EXPECT_EQ(events[3]["exit_code"], 0);
  };
  expect_job(
      "-n 2 --max-restarts 3" + kLogs,
      kSay +
          "echo attempt $LOCKSTEP_ATTEMPT\n"
          "[ $LOCKSTEP_ATTEMPT = 1 ] && { say progress 11; say done; exit 0; }\n"
          "[ $rank = 0 ] && { say progress 3; say checkpointed 10; say progress 12; sleep 0.1; : > $TMPDIR/../go; "
          "sleep 100; }\nuntil [ -e $TMPDIR/../go ]; do sleep 0.01; done; kill -KILL $$",
      {.start = kBoth,
       .out = {"[0] attempt 0", "[0] attempt 1", "[1] attempt 1"},
       .not_err = {"the last lines"},
       .then = is_told});
}

/// What a program does that outlives others: says so, and gets its next place.
const std::string kRejoins = kSay + "say rejoins\n" + kNextPlace +
                             "[ -z \"$LOCKSTEP_SPARE\" ] || next -1\n"
                             "port=$MASTER_PORT\n";

TEST(RestartTest, RanksThatOutliveAnotherOneKeepTheirProcesses) {
  const auto has_replaced = [](const Job& job) {
    has_restarts(1)(job);
    EXPECT_THAT(restart_lines(job).at(0),
                AllOf(HasSubstr("restart 1 of 3 in place: rank 1 of 3 (host "), HasSubstr("it was ended by SIGKILL"),
                      HasSubstr("; the job continues after step 12 with rank 1 started again")));
    const auto events = history(job);
    ASSERT_EQ(events.size(), 4u);
    const auto replace = parse_json(
        R"({"event": "replace", "attempt": 1, "exit_code": 137, "rank": 1, "replaced": [1], "ranks": 3, "after_step": 12})",
        2);
    for (const auto& [key, value] : replace.items()) EXPECT_EQ(events[1][key], value) << key;
    EXPECT_EQ(events[2]["event"], "resumed");
    EXPECT_EQ(events[2]["step"], 13);
    EXPECT_EQ(events[3]["exit_code"], 0);
  };
  for (const bool spare : {true, false})
    expect_job("-n 3 --max-restarts 3 --in-place" + kLogs,
               kRejoins +
                   "pid=$$\n"
                   "if [ $LOCKSTEP_ATTEMPT = 0 ]; then\n" +
                   // A spare is started when there is a step.
                   (spare ? "  [ $RANK = 0 ] && say progress 11; sleep 0.5\n" : "") +
                   "  sleep 0.2; [ $RANK = 1 ] && kill -KILL $$\n"
                   "  next $((12 - RANK / 2))\n"
                   "fi\n"
                   "echo $RANK of $WORLD_SIZE, attempt $LOCKSTEP_ATTEMPT\n"
                   "[ $RANK = 0 ] && say progress 13; sleep 0.2; say done",
               {.start = kOwn,
                .out = {"[0] 0 of 3, attempt 1", "[1] 1 of 3, attempt 1", "[2] 2 of 3, attempt 1"},
                .not_err = {"the last lines", "spare process"},
                .then = has_replaced});
}

TEST(RestartTest, ARankThatTheOthersWaitForInVainIsReplaced) {
  expect_job("-n 2 --max-restarts 3 --in-place" + kLogs,
             kRejoins +
                 "[ $LOCKSTEP_ATTEMPT = 1 ] && { say progress 3; exit 0; }\n"
                 "[ $RANK = 1 ] && sleep 100\nsleep 0.2; next 2; say progress 3",
             {.start = kOwn,
              .err = {"restart 1 of 3 in place: rank 1 of 2 (host ", "held up the others: they waited for it in vain",
                      "the job continues after step 2 with rank 1 started again"},
              .then = has_restarts(1)});
}

TEST(RestartTest, RanksThatHaveLostEachOtherConnectAgain) {
  expect_job(
      "-n 2 --max-restarts 3 --in-place" + kLogs,
      kRejoins + "sleep 0.2; before=$port; next 2; [ $before = $MASTER_PORT ] || echo another port; say progress 3",
      {.start = kOwn,
       .out = {"[0] another port", "[1] another port"},
       .err = {"restart 1 of 3 in place: the ranks have lost each other; the job continues after step 2 with all "
               "ranks connecting again"},
       .then = has_restarts(1)});
}

TEST(RestartTest, SurvivorsEndWithAFailureThatWouldRepeat) {
  expect_job(
      "-n 2 --max-restarts 3 --in-place" + kLogs,
      kRejoins + "sleep 0.2; [ $RANK = 1 ] && exit 3\ntrap 'exit 4' TERM; say stranded 2; sleep 100 & wait",
      {.start = kOwn,
       .code = 3,
       .err = {"rank 1 of 2", "exited with code 3", "not restarted: exit code 3 is for bad or missing input data"},
       .then = has_restarts(0)});
}

// A spare that ends is missed by nobody, and takes no place.
TEST(RestartTest, ASpareThatEndsIsReplacedByAStart) {
  expect_job("-n 2 --max-restarts 3 --in-place" + kLogs,
             kSay + "[ -z \"$LOCKSTEP_SPARE\" ] || { echo I end; exit 7; }\n" + kRejoins +
                 "[ $LOCKSTEP_ATTEMPT = 1 ] && { say progress 3; exit 0; }\n"
                 "for i in 1 2 3 4 5; do say progress $i; sleep 0.2; done; [ $RANK = 1 ] && kill -KILL $$\nnext 2; say "
                 "progress 6",
             {.start = kOwn,
              .err = {"lockstep: the spare process: I end", "spare processes end by themselves",
                      "continues after step 2 with rank 1 started again"},
              .then = has_restarts(1)});
}

TEST(RestartTest, ALoopOfCrashesEndsWithTheReason) {
  expect_job("-n 2 --max-restarts 100", "[ $RANK = 1 ] && { echo I crash; exit 9; }; sleep 100",
             {.start = kOwn,
              .code = 9,
              .err = {"not restarted: no further step and no newer checkpoint", "rank 1 of 2", "  | I crash\n"},
              .then = has_restarts(1)});
}

TEST(RestartTest, RestartsAreCounted) {
  expect_job("-n 1 --max-restarts 2", kSay + "say checkpointed $((LOCKSTEP_ATTEMPT + 1)); exit 4",
             {.start = kOwn, .code = 4, .err = {"--max-restarts 2 allows no more"}, .then = has_restarts(2)});
}

TEST(RestartTest, SomeEndsAreFinal) {
  for (const int code : {2, 3, 6, 7, 75, 143})
    expect_job("-n 2 --max-restarts 5", "[ $RANK = 1 ] && exit " + std::to_string(code) + "; sleep 100",
               {.start = kOwn, .code = code, .then = has_restarts(0)});
  expect_job("-n 1 --max-restarts 3", "",
             {.code = 127, .err = {"a program that cannot be started"}, .program = {"no-such-program"}});
}

TEST(RestartTest, AStopIsFinal) {
  expect_job("-n 2 --max-restarts 5", "echo ready; while :; do sleep 0.01; done",
             {.start = kOwn, .ready = 2, .act = sends(SIGTERM), .code = 143, .then = has_restarts(0)});
}

// The user asks for the end of a job that is ending already.
TEST(RestartTest, AStopWhileAFailedJobEndsIsFinal) {
  const auto asks = [](Job& job) {
    ASSERT_TRUE(job.says("[0] asked"));
    job.send(SIGTERM);
  };
  expect_job("-n 2 --max-restarts 5 --grace-seconds 100",
             "[ $RANK = 1 ] && { until [ -e $TMPDIR/../go ]; do sleep 0.01; done; exit 9; }\n"
             "trap 'echo asked; sleep 2; exit 0' TERM; : > $TMPDIR/../go; while :; do sleep 0.01; done",
             {.start = kOwn, .act = asks, .code = 9, .then = has_restarts(0)});
}

TEST(RestartTest, AStopEndsThePauseBeforeARestart) {
  // Further each time, and never a checkpoint: the pauses grow.
  const auto asks = [](Job& job) {
    ASSERT_TRUE(job.says("restart 4 of 100 in 2 s")) << job.err();
    job.send(SIGINT);
  };
  expect_job("-n 1 --max-restarts 100", kSay + "say progress $LOCKSTEP_ATTEMPT; exit 9",
             {.start = kOwn, .act = asks, .code = 130, .seconds = 20});
}

TEST(RestartTest, RanksAreTakenOffDownToTheLeast) {
  const auto on_two = [](const Job& job) {
    has_restarts(2)(job);
    EXPECT_THAT(restart_lines(job).back(), HasSubstr("from the start on 2 ranks"));
  };
  expect_job("-n 3 --max-restarts 10 --min-ranks 2",
             "[ $WORLD_SIZE = 2 ] && { echo two do; exit 0; }; [ $RANK = 2 ] && kill -KILL $$; sleep 100",
             {.start = kOwn, .out = {"[0] two do", "[1] two do"}, .then = on_two});
}

TEST(RestartTest, NothingIsLeftWhereTheLauncherIsKilledInALaterAttempt) {
  expect_job("-n 2 --max-restarts 5",
             kSay +
                 "say checkpointed $((LOCKSTEP_ATTEMPT + 1)); [ $LOCKSTEP_ATTEMPT = 2 ] || exit 9\n"
                 "trap '' TERM; echo ready; while :; do sleep 0.01; done",
             {.start = kOwn, .ready = 2, .act = sends(SIGKILL), .code = 137, .clean_seconds = 5});
}

TEST(RestartTest, WrongNumbersAreRefused) {
  for (const auto& [flags, says] : std::vector<std::pair<std::string, std::string>>{
           {"-n 2 --min-ranks 1", "--min-ranks without --max-restarts"},
           {"-n 2 --in-place", "--in-place without --max-restarts"},
           {"-n 2 --in-place --max-restarts 1 --mpi", "mpirun starts the ranks"},
           {"-n 2 --max-restarts 1 --min-ranks 3", "--min-ranks 3 of 2 ranks"},
           {"-n 2 --max-restarts 1 --min-ranks 0", "--min-ranks 0 of 2 ranks"},
           {"-n 2 --max-restarts -1", "-1 restarts"}})
    expect_job(flags, "exit 0", {.start = kOwn, .code = 2, .err = {says}});
}

}  // namespace
}  // namespace lockstep::launcher
