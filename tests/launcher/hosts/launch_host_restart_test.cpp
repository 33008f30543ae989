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

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// `say` reports; `wait_for NAME` waits for a file beside the job; `attempt N` is true in that one.
const std::string kWords =
    "say() { echo \"$@\" >&$LOCKSTEP_STATUS_FD; }\n"
    "wait_for() { until [ -e $TMPDIR/../$1 ]; do sleep 0.02; done; }\n"
    "attempt() { [ $LOCKSTEP_ATTEMPT = $1 ]; }\n"
    "rank=${RANK-$OMPI_COMM_WORLD_RANK}; size=${WORLD_SIZE-$OMPI_COMM_WORLD_SIZE}\n"
    "echo attempt $LOCKSTEP_ATTEMPT: $rank of $size on ${FAKE_HOST-own}\n";
const std::string kForEver = "\necho ready; while :; do sleep 0.02; done";

class HostRestartTest : public ::testing::Test {
 protected:
  Job start(const std::string& flags, const std::string& script, bool own = true) {
    TestJobSetup setup = fake_hosts();
    directory_ = setup.directory;
    return Job((own ? own_sh : sh)(flags + " --log-dir " + directory_ + "/logs", kWords + script), setup);
  }
  std::vector<nlohmann::json> history(const std::string& event) const {
    std::vector<nlohmann::json> events;
    std::ifstream file(directory_ + "/logs/restarts.jsonl");
    for (std::string line; std::getline(file, line);)
      if (auto one = parse_json(line, 2); one["event"] == event) events.push_back(std::move(one));
    return events;
  }
  void signal_file(const std::string& name) const { std::ofstream(directory_ + "/" + name) << "yes"; }

  std::string directory_;
};

TEST_F(HostRestartTest, ALostHostIsLeftOutAndTheOthersHelpersStay) {
  for (const bool own : {true, false}) {
    Job job = start("--hosts a:1,b:2,localhost:1 --max-restarts 3 --min-ranks 1",
                    "attempt 1 && { wait_for go; [ $rank = 0 ] && { say progress 21; say done; }; exit 0; }\n"
                    "[ $rank = 0 ] && { say checkpointed 20; say progress 23; }" +
                        kForEver,
                    own);
    ASSERT_TRUE(all_ready(job, 4)) << job.err();
    const pid_t helper = helper_on(job, "a");
    kill_host(job, "b", true);
    ASSERT_TRUE(job.says("attempt 1: 1 of 2 on own")) << job.out() << job.err();
    EXPECT_EQ(helper_on(job, "a"), helper);
    signal_file("go");
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.out(), HasSubstr("] attempt 1: 0 of 2 on a\n"));
    EXPECT_THAT(job.err(),
                AllOf(HasSubstr("restart 1 of 3: host b (ranks 1 and 2) was lost: the connection to it ended "),
                      HasSubstr("; from the checkpoint of step 20 on 2 ranks, 3 steps and ")));
    const auto restarts = history("restart");
    ASSERT_EQ(restarts.size(), 1u);
    EXPECT_EQ(restarts[0]["exit_code"], 4);
    EXPECT_EQ(restarts[0]["ranks"], 2);
    EXPECT_EQ(restarts[0]["from_step"], 20);
    EXPECT_EQ(history("resumed").size(), 1u);
    std::ifstream log(directory_ + "/logs/rank-0.log");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(log), {}),
              "attempt 0: 0 of 4 on a\nready\nattempt 1: 0 of 2 on a\n");
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST_F(HostRestartTest, TheFirstHostMayBeTheOne) {
  Job job = start("--hosts a:1,b:2 --max-restarts 3 --min-ranks 1",
                  "attempt 1 && { echo checkpoint $LOCKSTEP_CHECKPOINT_STEP; exit 0; }\n"
                  "[ $rank = 0 ] && say checkpointed 20; echo before $LOCKSTEP_CHECKPOINT_STEP" +
                      kForEver);
  ASSERT_TRUE(all_ready(job, 3)) << job.err();
  kill_host(job, "a", true);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), AllOf(HasSubstr("[0@b] attempt 1: 0 of 2 on b\n"), HasSubstr("[1@b] checkpoint 20\n"),
                               HasSubstr("[0@a] before 0\n")));
  EXPECT_THAT(job.err(), HasSubstr("host a (rank 0) was lost"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, AHostThatAnswersAgainAtOnceKeepsItsRanks) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3 --min-ranks 1", "attempt 1 && exit 0" + kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  kill_host(job, "b", false);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[1@b] attempt 1: 1 of 2 on b\n"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, ARankThatFailsLeavesAllHelpersAlone) {
  Job job = start(
      "--hosts a:1,b:1 --max-restarts 3",
      "attempt 1 && { wait_for go; exit 0; }; attempt 0 && [ $rank = 1 ] && { wait_for go0; exit 9; }" + kForEver);
  ASSERT_TRUE(job.says("[0@a] ready")) << job.err();
  const pid_t a = helper_on(job, "a"), b = helper_on(job, "b");
  signal_file("go0");
  ASSERT_TRUE(job.says("[1@b] attempt 1: 1 of 2 on b")) << job.err();
  EXPECT_EQ(helper_on(job, "a"), a);
  EXPECT_EQ(helper_on(job, "b"), b);
  signal_file("go");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

// Hosts that have returned take part after the next checkpoint, whatever ranks do when they are asked to end.
TEST_F(HostRestartTest, TheJobGrowsBackAtTheNextCheckpoint) {
  for (const char* trap : {"trap 'say checkpointed 31; exit 75' TERM", "trap - TERM"}) {
    Job job = start(
        "--hosts a:1,b:2 --max-restarts 1 --min-ranks 1",
        "attempt 2 && exit 0; attempt 1 && " + std::string(trap) +
            "\nattempt 0 && say checkpointed 20; attempt 1 && { say checkpointed 20; say progress 21; wait_for go; "
            "say progress 30; say checkpointed 30; }" +
            kForEver);
    ASSERT_TRUE(all_ready(job, 3)) << job.err();
    kill_host(job, "b", true);
    ASSERT_TRUE(job.says("attempt 1: 0 of 1 on a")) << job.err();
    let_return(job, "b");
    const auto deadline = Deadline::after_seconds(30);
    while (helper_on(job, "b") < 0 && !deadline.expired()) std::this_thread::sleep_for(Millis(20));
    std::this_thread::sleep_for(Millis(500));
    EXPECT_THAT(job.out(), Not(HasSubstr("attempt 2"))) << "before the checkpoint";
    signal_file("go");
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.out(),
                AllOf(HasSubstr("[0@a] attempt 2: 0 of 3 on a\n"), HasSubstr("[1@b] attempt 2: 1 of 3 on b\n"),
                      HasSubstr("[2@b] attempt 2: 2 of 3 on b\n")));
    EXPECT_THAT(job.err(), HasSubstr("the job grows: hosts have returned; from the checkpoint of step 3"));
    const auto grown = history("grow");
    ASSERT_EQ(grown.size(), 1u);
    EXPECT_EQ(grown[0]["ranks"], 3);
    EXPECT_EQ(history("restart").size(), 1u) << "growing is no restart after a failure";
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

TEST_F(HostRestartTest, ASpareHostTakesOver) {
  Job job = start("--hosts a:1,b:1,c:1 -n 2 --max-restarts 3", "attempt 1 && exit 0" + kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  EXPECT_GT(helper_on(job, "c"), 0);
  kill_host(job, "a", true);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(),
              AllOf(HasSubstr("[0@b] attempt 1: 0 of 2 on b\n"), HasSubstr("[1@c] attempt 1: 1 of 2 on c\n")));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, WithTooFewHostsItWaitsForThem) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3", "attempt 1 && exit 0" + kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  kill_host(job, "b", true);
  ASSERT_TRUE(
      job.says("waiting for hosts, for up to 600 s: the hosts that answer have 1 slot, and the job needs 2 at "
               "least (host b: "))
      << job.err();
  let_return(job, "b");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[1@b] attempt 1: 1 of 2 on b\n"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, TheWaitEndsWithTheReason) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3 --host-return-seconds 0.5", kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  kill_host(job, "b", true);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(),
              HasSubstr("not restarted: the hosts that answer have 1 slot, and the job needs 2 at least (host "
                        "b: there is no route to it"));
  EXPECT_EQ(history("end").at(0)["exit_code"], 4);
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, AStopEndsTheWait) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3", kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  kill_host(job, "b", true);
  ASSERT_TRUE(job.says("waiting for hosts")) << job.err();
  job.send(SIGTERM);
  EXPECT_EQ(job.wait(within_eight()), 143);
  EXPECT_THAT(job.err(), HasSubstr("stopped by SIGTERM before restart 1"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, RepeatedLossWithoutProgressEndsTheJob) {
  Job job = start("--hosts a:1,b:1 --max-restarts 100",
                  "[ $FAKE_HOST = b ] && kill -KILL $(ps -o ppid= -p $PPID)" + kForEver);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("not restarted: no further step and no newer checkpoint"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, RepeatedlyLostHostStaysOut) {
  Job job = start("--hosts a:1,b:1 --max-restarts 100 --min-ranks 1",
                  "[ $size = 1 ] && exit 0; [ $FAKE_HOST = b ] && kill -KILL $(ps -o ppid= -p $PPID)" + kForEver);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(history("restart").size(), 2u);
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

// Its network, its memory or its devices may be broken, although it answers.
TEST_F(HostRestartTest, AHostWhoseRanksFailAgainIsLeftOut) {
  Job job = start("--hosts a:2,b:1,c:1 --max-restarts 100 --min-ranks 2",
                  "[ $FAKE_HOST = a ] && exit 4; [ $size = 2 ] && exit 0" + kForEver);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(),
              HasSubstr("host a is left out for now: its ranks were the cause of a failure without progress"));
  EXPECT_THAT(job.out(), AllOf(HasSubstr("attempt 2: 0 of 2 on b\n"), HasSubstr("attempt 2: 1 of 2 on c\n")));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, AHostThatFallsSilentIsLeftOut) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3 --min-ranks 1 --host-timeout-seconds 6",
                  "attempt 1 && exit 0" + kForEver);
  ASSERT_TRUE(all_ready(job, 2)) << job.err();
  std::ofstream(job.directory() + "/down-b") << "yes";
  ::kill(helper_on(job, "b"), SIGSTOP);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("restart 1 of 3 in 0.25 s: host b (rank 1) was lost: it was last heard from "));
  EXPECT_THAT(job.out(), HasSubstr("[0@a] attempt 1: 0 of 1 on a\n"));
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

TEST_F(HostRestartTest, NothingIsLeftWhereTheLauncherIsKilledInALaterAttempt) {
  Job job = start("--hosts a:1,b:1 --max-restarts 3",
                  "trap '' TERM; attempt 1 || [ $rank = 0 ] || { wait_for go; exit 9; }" + kForEver);
  ASSERT_TRUE(job.says("[0@a] ready")) << job.err();
  signal_file("go");
  ASSERT_TRUE(job.says("[1@b] ready")) << job.err();
  job.send(SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  EXPECT_EQ(job.leftovers_at(within_eight()), "");
}

// Helpers would end a job whose launcher is silent.
TEST_F(HostRestartTest, AHelperOutlivesALongPause) {
  Job job =
      start("--hosts a:1,b:1 --max-restarts 100 --host-timeout-seconds 6",
            "[ $LOCKSTEP_ATTEMPT = 6 ] && exit 0; say progress $LOCKSTEP_ATTEMPT; [ $rank = 0 ] || exit 9" + kForEver);
  ASSERT_TRUE(job.says("restart 1 of 100")) << job.err();
  const pid_t helper = helper_on(job, "a");
  EXPECT_GT(helper, 0);
  ASSERT_TRUE(job.says("restart 6 of 100 in 8 s")) << job.err();
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(), Not(HasSubstr("was lost")));
}

TEST_F(HostRestartTest, WrongFlagsAreRefused) {
  for (const auto& [flags, says] : std::vector<std::pair<std::string, std::string>>{
           {"--hosts a:1,b:1 --host-return-seconds 5", "--host-return-seconds is for jobs on several hosts that are"},
           {"-n 2 --max-restarts 1 --host-return-seconds 5", "--host-return-seconds is for jobs on several hosts that"},
           {"--hosts a:1 --max-restarts 1 --host-return-seconds -1", "a wait of -1 s for hosts"},
           {"--hosts a:1,b:1 --max-restarts 1 --min-ranks 3", "--min-ranks 3 of 2 ranks"}}) {
    Job job = start(flags, "echo ran");
    EXPECT_EQ(job.wait(), 2) << flags;
    EXPECT_THAT(job.err(), HasSubstr(says));
    EXPECT_EQ(job.out(), "");
    EXPECT_EQ(job.leftovers_at(within_eight()), "");
  }
}

}  // namespace
}  // namespace lockstep::launcher
