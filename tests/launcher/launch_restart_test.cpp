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
using ::testing::Not;

/// Reports, as any program may.
const std::string kReport = "say() { echo \"$@\" >&$LOCKSTEP_STATUS_FD; }\n";

struct Restarted {
  std::string directory = make_test_directory();
  Job job;
  explicit Restarted(const std::string& flags, const std::string& script, bool own = true)
      : job((own ? own_sh : sh)(flags + " --log-dir " + directory + "/logs", kReport + script),
            {.environment = {}, .prefix = {}, .directory = directory}) {}

  std::vector<nlohmann::json> history() const {
    std::vector<nlohmann::json> events;
    std::ifstream file(directory + "/logs/restarts.jsonl");
    for (std::string line; std::getline(file, line);) events.push_back(parse_json(line, 2));
    return events;
  }
  std::vector<std::string> restart_lines() const {
    auto lines = split(job.err(), '\n');
    std::erase_if(lines, [](const auto& line) { return line.find("lockstep: restart ") != 0; });
    return lines;
  }
};

TEST(RestartTest, AFailureIsRestartedFromTheCheckpointThatWasReported) {
  for (const bool own : {true, false}) {
    Restarted run(
        "-n 2 --max-restarts 3",
        "rank=${RANK-$OMPI_COMM_WORLD_RANK}; echo attempt $LOCKSTEP_ATTEMPT\n"
        "[ $LOCKSTEP_ATTEMPT = 1 ] && { say progress 11; say done; exit 0; }\n"
        "[ $rank = 0 ] && { say progress 3; say checkpointed 10; say progress 12; sleep 0.1; : > $TMPDIR/../go; "
        "sleep 100; }\nuntil [ -e $TMPDIR/../go ]; do sleep 0.01; done; kill -KILL $$",
        own);
    EXPECT_EQ(run.job.wait(), 0) << run.job.err();
    ASSERT_EQ(run.restart_lines().size(), 1u) << run.job.err();
    EXPECT_THAT(
        run.restart_lines()[0],
        AllOf(HasSubstr("restart 1 of 3: rank 1 of 2 (host "), HasSubstr("it was ended by SIGKILL"),
              HasSubstr("; from the checkpoint of step 10 on 2 ranks, 2 steps and "), HasSubstr(" s are lost")));
    EXPECT_THAT(run.job.err(), Not(HasSubstr("the last lines")));
    EXPECT_THAT(run.job.out(),
                AllOf(HasSubstr("[0] attempt 0"), HasSubstr("[0] attempt 1"), HasSubstr("[1] attempt 1")));
    // The same files continue.
    std::ifstream log(run.directory + "/logs/rank-0.log");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}), "attempt 0\nattempt 1\n");
    const auto history = run.history();
    ASSERT_EQ(history.size(), 4u);
    EXPECT_EQ(history[0]["event"], "start");
    EXPECT_EQ(history[1]["event"], "restart");
    EXPECT_EQ(history[1]["attempt"], 1);
    EXPECT_EQ(history[1]["exit_code"], 137);
    EXPECT_EQ(history[1]["rank"], 1);
    EXPECT_EQ(history[1]["from_step"], 10);
    EXPECT_EQ(history[1]["lost_steps"], 2);
    EXPECT_EQ(history[2]["event"], "resumed");
    EXPECT_EQ(history[2]["step"], 11);
    EXPECT_EQ(history[3]["event"], "end");
    EXPECT_EQ(history[3]["exit_code"], 0);
    EXPECT_EQ(run.job.leftovers(), "");
  }
}

TEST(RestartTest, ALoopOfCrashesEndsWithTheReason) {
  Restarted run("-n 2 --max-restarts 100", "[ $RANK = 1 ] && { echo I crash; exit 9; }; sleep 100");
  EXPECT_EQ(run.job.wait(), 9);
  EXPECT_EQ(run.restart_lines().size(), 1u) << run.job.err();
  EXPECT_THAT(run.job.err(), AllOf(HasSubstr("not restarted: no further step and no newer checkpoint"),
                                   HasSubstr("rank 1 of 2"), HasSubstr("  | I crash\n")));
  EXPECT_EQ(run.job.leftovers(), "");
}

TEST(RestartTest, RestartsAreCounted) {
  Restarted run("-n 1 --max-restarts 2", "say checkpointed $((LOCKSTEP_ATTEMPT + 1)); exit 4");
  EXPECT_EQ(run.job.wait(), 4);
  EXPECT_EQ(run.restart_lines().size(), 2u) << run.job.err();
  EXPECT_THAT(run.job.err(), HasSubstr("--max-restarts 2 allows no more"));
}

TEST(RestartTest, SomeEndsAreFinal) {
  for (const int code : {2, 3, 6, 7, 75, 143}) {
    Restarted run("-n 2 --max-restarts 5", "[ $RANK = 1 ] && exit " + std::to_string(code) + "; sleep 100");
    EXPECT_EQ(run.job.wait(), code);
    EXPECT_TRUE(run.restart_lines().empty()) << run.job.err();
  }
  Job missing({"-n", "1", "--max-restarts", "3", "--", "no-such-program"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_THAT(missing.err(), HasSubstr("a program that cannot be started"));
}

TEST(RestartTest, AStopIsFinal) {
  Restarted run("-n 2 --max-restarts 5", "echo ready; while :; do sleep 0.01; done");
  ASSERT_TRUE(run.job.says("[0] ready") && run.job.says("[1] ready"));
  run.job.send(SIGTERM);
  EXPECT_EQ(run.job.wait(), 143);
  EXPECT_TRUE(run.restart_lines().empty()) << run.job.err();
}

// The user asks for the end of a job that is ending already.
TEST(RestartTest, AStopWhileAFailedJobEndsIsFinal) {
  Restarted run("-n 2 --max-restarts 5 --grace-seconds 100",
                "[ $RANK = 1 ] && { until [ -e $TMPDIR/../go ]; do sleep 0.01; done; exit 9; }\n"
                "trap 'echo asked; sleep 2; exit 0' TERM; : > $TMPDIR/../go; while :; do sleep 0.01; done");
  ASSERT_TRUE(run.job.says("[0] asked"));
  run.job.send(SIGTERM);
  EXPECT_EQ(run.job.wait(), 9);
  EXPECT_TRUE(run.restart_lines().empty()) << run.job.err();
}

TEST(RestartTest, AStopEndsThePauseBeforeARestart) {
  // Further each time, and never a checkpoint: the pauses grow.
  Restarted run("-n 1 --max-restarts 100", "say progress $LOCKSTEP_ATTEMPT; exit 9");
  ASSERT_TRUE(run.job.says("restart 4 of 100 in 2 s")) << run.job.err();
  run.job.send(SIGINT);
  EXPECT_EQ(run.job.wait(Deadline::after_seconds(20)), 130);
  EXPECT_EQ(run.job.leftovers(), "");
}

TEST(RestartTest, RanksAreTakenOffDownToTheLeast) {
  Restarted run("-n 3 --max-restarts 10 --min-ranks 2",
                "[ $WORLD_SIZE = 2 ] && { echo two do; exit 0; }; [ $RANK = 2 ] && kill -KILL $$; sleep 100");
  EXPECT_EQ(run.job.wait(), 0) << run.job.err();
  EXPECT_EQ(run.restart_lines().size(), 2u) << run.job.err();
  EXPECT_THAT(run.restart_lines().back(), HasSubstr("from the start on 2 ranks"));
  EXPECT_THAT(run.job.out(), AllOf(HasSubstr("[0] two do"), HasSubstr("[1] two do")));
}

TEST(RestartTest, NothingIsLeftWhereTheLauncherIsKilledInALaterAttempt) {
  Restarted run("-n 2 --max-restarts 5",
                "say checkpointed $((LOCKSTEP_ATTEMPT + 1)); [ $LOCKSTEP_ATTEMPT = 2 ] || exit 9\n"
                "trap '' TERM; echo ready; while :; do sleep 0.01; done");
  ASSERT_TRUE(run.job.says("[0] ready"));
  run.job.send(SIGKILL);
  EXPECT_EQ(run.job.wait(), 137);
  EXPECT_EQ(run.job.leftovers_at(Deadline::after_seconds(5)), "");
}

TEST(RestartTest, WrongNumbersAreRefused) {
  for (const auto& [flags, says] : std::vector<std::pair<std::string, std::string>>{
           {"-n 2 --min-ranks 1", "--min-ranks without --max-restarts"},
           {"-n 2 --max-restarts 1 --min-ranks 3", "--min-ranks 3 of 2 ranks"},
           {"-n 2 --max-restarts 1 --min-ranks 0", "--min-ranks 0 of 2 ranks"},
           {"-n 2 --max-restarts -1", "-1 restarts"}}) {
    Job job(own_sh(flags, "exit 0"));
    EXPECT_EQ(job.wait(), 2);
    EXPECT_THAT(job.err(), HasSubstr(says));
  }
}

}  // namespace
}  // namespace lockstep::launcher
