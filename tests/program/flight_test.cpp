// What ranks and launcher say of a rank that crashes, stands still or is slow: tests/program/faulty.cpp is the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

#include "tests/program/command.h"
#include "tests/support/json.h"
#include "tests/support/namespaces.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kFaultyTrain =
    "faulty --steps 60 --threads 1 --quiet --stall-warning-seconds 1 --timeout-seconds 4 --batch 16";

class Flight : public ::testing::Test {
 protected:
  /// `ranks` ranks of `program` with this fault.
  Outcome start(int ranks, const std::string& fault, const std::string& program = kFaultyTrain) {
    return run("PATH=$(dirname " FAULTY_PROGRAM "):$PATH; LOCKSTEP_TEST_FAULT=" + fault + " lockstep launch -n " +
                   std::to_string(ranks) + " --log-dir logs -- " + program,
               directory_.path());
  }
  nlohmann::json inspect(int rank) {
    const auto outcome =
        run_well("lockstep inspect --json logs/flight/rank-" + std::to_string(rank), directory_.path());
    return nlohmann::json::parse(outcome.out);
  }
  /// Of the ranks' lines, those with this text.
  static std::vector<std::string> lines_with(const Outcome& outcome, const std::string& text) {
    std::vector<std::string> found;
    for (auto& line : lines_of(outcome.err))
      if (line.find(text) != std::string::npos) found.push_back(std::move(line));
    return found;
  }

  TemporaryDirectory directory_;
};

TEST_F(Flight, ACrashIsReportedWithItsPlaceAndItsBacktrace) {
  const auto outcome = start(2, "crash:1");
  EXPECT_EQ(outcome.code, 139) << outcome.err;
  EXPECT_THAT(outcome.err,
              AllOf(ContainsRegex("rank 1 of 2 .* failed first: it was ended by SIGSEGV"),
                    HasSubstr("lockstep: rank 1 was in the forward pass of step 10 for "),
                    ContainsRegex("; the last operation it issued is allreduce #[0-9]+ .*step 9, bucket 0.*, complete"),
                    ContainsRegex("lockstep: rank 0 was waiting for rank 1 in allreduce .*step 10, bucket 0"),
                    HasSubstr("| crashed by SIGSEGV at address 0x0; its backtrace is above")));
  const auto frames = lines_with(outcome, "lockstep::trainer::train(int, char**");
  EXPECT_EQ(frames.size(), 1u) << outcome.err;
  for (const auto& frame : frames) EXPECT_THAT(frame, StartsWith("[1]     "));
  const auto crashed = inspect(1), other = inspect(0);
  EXPECT_EQ(crashed["signal"], "SIGSEGV");
  EXPECT_EQ(crashed["phase"], "forward");
  EXPECT_EQ(crashed["step"], 10);
  EXPECT_GE(crashed["backtrace"].size(), 5u);
  EXPECT_FALSE(other["waits_since_s"].is_null());
  EXPECT_TRUE(other["operations"].back()["took_ms"].is_null());
  EXPECT_EQ(other["operations"].back()["step"], 10);
  const auto tables = run_well("lockstep inspect logs --last 3", directory_.path());
  EXPECT_THAT(tables.out, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("rank 1 of 2"), HasSubstr("crashed by SIGSEGV")));
}

TEST_F(Flight, OtherWaysToCrash) {
  EXPECT_THAT(start(2, "overflow:0").err, AllOf(ContainsRegex("rank 0 of 2 .* was ended by SIGSEGV"),
                                                HasSubstr("rank 0 was in the forward pass of step 10"),
                                                HasSubstr("| crashed by SIGSEGV at address 0x")))
      << "its own stack is used up";
  EXPECT_THAT(start(2, "abort:1").err,
              AllOf(ContainsRegex("rank 1 of 2 .* was ended by SIGABRT"),
                    HasSubstr("| crashed by SIGABRT; its backtrace is above"), HasSubstr("abort")));
}

TEST_F(Flight, ARankThatEndsEarlyIsReportedWithItsPlace) {
  EXPECT_THAT(start(2, "end:1"), fails_with(4, "rank 1 was in the forward pass of step 10",
                                            "rank 0 was waiting for rank 1 in allreduce #"));
}

// The root cause says where the rank was when the others gave up, not what it did when it was resumed to end.
TEST_F(Flight, AStoppedRankIsNamedLongBeforeTheTimeout) {
  const auto outcome = start(3, "stop:1");
  EXPECT_EQ(outcome.code, 5) << outcome.err;
  const auto warnings = lines_with(outcome, " has waited ");
  ASSERT_GE(warnings.size(), 1u) << outcome.err;
  EXPECT_THAT(warnings[0], AllOf(ContainsRegex("step 10, bucket 0. has waited [0-9.]+ s for rank 1 .host "),
                                 ContainsRegex("in the forward pass of step 10 for [0-9.]+ s; it is stopped, and kill "
                                               "-CONT [0-9]+ resumes it")));
  EXPECT_THAT(
      outcome.err,
      AllOf(ContainsRegex("lockstep: rank 1 was in the forward pass of step 10 for [0-9.]+ s; the last operation"),
            HasSubstr("lockstep: ranks 0 and 2 were waiting for rank 1 in allreduce #")));
}

TEST_F(Flight, ASlowDiskAndAnEndlessLoopInADataSetAreDistinguished) {
  for (const auto& [fault, why] : {std::pair("halt:1", "that thread sleeps: a slow disk or file system, or a lock"),
                                   std::pair("loop:1", "that thread computes: an endless loop in the data set")}) {
    const auto outcome = start(2, fault);
    EXPECT_EQ(outcome.code, 5) << outcome.err;
    const auto warnings = lines_with(outcome, " has waited ");
    ASSERT_GE(warnings.size(), 1u) << outcome.err;
    EXPECT_THAT(warnings[0],
                AllOf(HasSubstr("for rank 1 (host "), HasSubstr("waiting for its next batch of step 13 for "),
                      ContainsRegex("data worker 0 has been reading sample [0-9]+ for [0-9.]+ s"), HasSubstr(why)));
    EXPECT_THAT(outcome.err,
                ContainsRegex("lockstep: rank 1 was waiting for its next batch of step 13 .* reading sample [0-9]+"));
    EXPECT_EQ(inspect(1)["phase"], "data");
  }
}

TEST_F(Flight, ASkippedAndAnExtraCollectiveAreNamed) {
  const auto skipped = start(3, "skip:1", "faulty collectives");
  EXPECT_EQ(skipped.code, 5) << skipped.err;
  EXPECT_THAT(lines_with(skipped, " has waited ").front(),
              AllOf(HasSubstr("allreduce #10 "), HasSubstr("for rank 1 (host "),
                    HasSubstr("the last that it issued is allreduce #9 "), HasSubstr("running for ")));
  EXPECT_THAT(skipped.err, HasSubstr("lockstep: ranks 0 and 2 were waiting for rank 1 in allreduce #10 (4 B) for "));
  const auto extra = start(3, "extra:1", "faulty collectives");
  EXPECT_EQ(extra.code, 5) << extra.err;
  EXPECT_THAT(lines_with(extra, " has waited ").front(),
              AllOf(HasSubstr("barrier #11 has waited"), HasSubstr("for rank 0 (host "), HasSubstr("; rank 2 (host "),
                    HasSubstr("the last that it issued is allreduce #10 ")));
  EXPECT_THAT(extra.err, HasSubstr("lockstep: rank 1 was waiting for ranks 0 and 2 in barrier #11 for "));
}

// Over MPI's messages whom a rank waits for is found out by other means.
TEST_F(Flight, TheSameOverMpi) {
  const auto outcome = start(2, "loop:1",
                             "faulty --steps 60 --threads 1 --quiet --stall-warning-seconds 1 --timeout-seconds 8 "
                             "--batch 16 --backend mpi");
  EXPECT_EQ(outcome.code, 5) << outcome.err;
  EXPECT_THAT(outcome.err, ContainsRegex("has waited [0-9.]+ s for rank 1 .*waiting for its next batch of step 13"));
}

// Without a launcher: a directory that the user names, and ranks that find each other's records in it.
TEST_F(Flight, TheDirectoryMayBeTheUsers) {
  const auto outcome = run(
      "export LOCKSTEP_FLIGHT_DIR=kept LOCKSTEP_TEST_FAULT=loop:0:6000; PATH=$(dirname " FAULTY_PROGRAM "):$PATH; " +
          on_ranks(2) + kFaultyTrain,
      directory_.path());
  EXPECT_NE(outcome.code, 0);
  EXPECT_THAT(outcome.out + outcome.err, ContainsRegex("for rank 0 .*waiting for its next batch of step 13"));
  const auto inspected = run_well("lockstep inspect kept --last 1", directory_.path());
  EXPECT_THAT(inspected.out, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("rank 1 of 2")));
}

TEST_F(Flight, ARankThatIsKilledHasItsRecordInAndAfterARestart) {
  const auto outcome = run_well(
      "PATH=$(dirname " FAULTY_PROGRAM
      "):$PATH; lockstep launch -n 2 --max-restarts 1 --log-dir logs -- bash -c \"LOCKSTEP_TEST_FAULT=\\$([ "
      "\\$LOCKSTEP_ATTEMPT = 0 ] && echo crash:1) exec faulty --steps 20 --threads 1 --quiet --checkpoint-dir ck "
      "--checkpoint-every 3 --resume auto\"",
      directory_.path());
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("restart 1 of 1: rank 1 of 2"), HasSubstr("lockstep: rank 1 was in the forward "
                                                                        "pass of step 10")));
  EXPECT_EQ(inspect(1)["attempt"], 0);
}

TEST_F(Flight, ARunThatEndsWellSaysNothingAndLeavesNoRecord) {
  std::filesystem::create_directories(directory_.path() / "logs" / "flight");
  ASSERT_EQ(run("printf x >logs/flight/rank-0", directory_.path()).code, 0) << "of an earlier job";
  const auto outcome = ended_well(start(2, "none:7"));
  EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("has waited")), Not(HasSubstr("lockstep: rank"))));
  EXPECT_THAT(run("lockstep inspect logs", directory_.path()), fails_with(3, "logs: there is no flight record in it"));
}

TEST_F(Flight, UsageErrorsKeepNoRecord) {
  const auto outcome = start(2, "none:7", "faulty --bach 3");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "logs" / "flight" / "rank-0"));
}

// Three reasons, three sentences; in the log and in the summary. Where other programs disturb all ranks at once, there
// may be no straggler for a while, or another one: then once more.
TEST_F(Flight, ASlowRankIsNamedWithTheReason) {
  for (const auto& [fault, says] :
       {std::pair("slow:1:20", "it computes "), std::pair("slow-data:1:2", "per step for its data, the others "),
        std::pair("neighbour:1", "of that it waits for a processor")}) {
    const std::string sentence = std::string("rank 1 .host .* holds the others up: .*") + says;
    const std::regex warning("warning: step [0-9]+: " + sentence);
    Outcome outcome;
    for (int attempt = 0; attempt < 3 && !std::regex_search(outcome.err, warning); ++attempt) {
      outcome = ended_well(start(2, fault, "faulty --steps 81 --threads 1 --batch 16"));
    }
    EXPECT_TRUE(std::regex_search(outcome.err, warning)) << fault << '\n' << outcome.err;
    EXPECT_THAT(outcome.out, ContainsRegex("straggler: rank 1 .*holds the others up"));
  }
}

TEST_F(Flight, ASlowLinkIsNamed) {
  const Namespaces hosts(2);
  if (!hosts.why_not().empty()) GTEST_SKIP() << hosts.why_not();
  if (!hosts.join() || !run_quietly("ip netns exec " + hosts.name(0) +
                                    " tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms"))
    GTEST_SKIP() << "the network cannot be shaped here";
  const std::string train = "lockstep train mlp --data digits --hidden 256,256 --steps 25 --batch 16 --threads 1";
  const auto rank = [&](int number) {
    return "ip netns exec " + hosts.name(number) + " env RANK=" + std::to_string(number) +
           " WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=" + hosts.address(0) +
           " MASTER_PORT=29500 LOCKSTEP_JOB_SECRET=00112233445566778899aabbccddeeff LOCKSTEP_HOST_NAME=h" +
           std::to_string(number) + " " + train;
  };
  const auto outcome = run(rank(1) + " & " + rank(0) + "; wait", directory_.path());
  EXPECT_THAT(outcome.err, HasSubstr("warning: step 20: the link between host h0 and host h1 holds the ranks up"));
  EXPECT_THAT(outcome.out, HasSubstr("straggler: the link between host h0 and host h1"));
}

}  // namespace
}  // namespace lockstep::testing
