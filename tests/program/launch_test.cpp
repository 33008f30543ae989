// The program under its launcher: what ranks report to it besides their output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/free_port.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Launched, AUsageErrorIsSaidOnce) {
  const TemporaryDirectory directory;
  for (const char* const program :
       {"lockstep train cnn --data digits --bach 3", "lockstep train cnn --data digits --lr x",
        "lockstep train cnn --data digits --global-batch 2 --tail pad", "bash -c \"lockstep train nosuch; exit 2\""}) {
    const auto outcome = run(std::string("lockstep launch -n 3 -- ") + program, directory.path());
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    const auto lines = lines_of(outcome.err);
    EXPECT_EQ(std::ranges::count_if(lines, [](const auto& line) { return line.find("→") != std::string::npos; }), 1)
        << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("failed first")));
    EXPECT_EQ(outcome.out, "");
  }
}

// Whoever reads another file than the launcher's output finds it there.
TEST(Launched, AUsageErrorGoesWhereStderrGoes) {
  const TemporaryDirectory directory;
  const auto outcome =
      run("lockstep launch -n 1 -- bash -c \"lockstep train cnn --data digits --bach 3 2>said; cat said; exit 2\"",
          directory.path());
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.out, HasSubstr("[0] error: "));
}

TEST(Launched, DataHasNoPrefix) {
  const TemporaryDirectory directory;
  const std::string launch = "lockstep launch -n 2 -- lockstep bench ", sizes = " --min 8 --max 64K --iterations 2 ";
  const auto as_json = run_well(launch + "allreduce --json" + sizes, directory.path());
  ASSERT_FALSE(as_json.out.empty());
  for (const auto& line : lines_of(as_json.out)) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  const auto as_csv = run_well(launch + "allreduce --csv" + sizes, directory.path());
  EXPECT_EQ(as_csv.out.find("collective,bytes,"), 0u) << as_csv.out;
  const auto step = run_well(launch + "step mlp --steps 2 --warmup-steps 1 --json", directory.path());
  EXPECT_TRUE(nlohmann::json::accept(step.out)) << step.out;
  const auto table = run(launch + "allreduce" + sizes, directory.path());
  for (const auto& line : lines_of(table.out)) EXPECT_EQ(line.find("[0] "), 0u) << line;
}

TEST(Launched, AStoppedRankIsNamedAndNotTheOneThatGivesUp) {
  for (const char* const backend : {"shm", "mpi"}) {
    const TemporaryDirectory directory;
    const auto outcome =
        run("lockstep launch -n 3 -- bash -c \"[ \\$OMPI_COMM_WORLD_RANK != 1 ] || { until grep -q event.:.step "
            "m.jsonl; do sleep "
            "0.05; done; kill -STOP \\$\\$; } 2>/dev/null & exec lockstep train cnn --data digits --global-batch 60 "
            "--steps 100000000 --quiet --threads 1 --metrics m.jsonl --timeout-seconds 4 --backend " +
                std::string(backend) + "\"",
            directory.path());
    EXPECT_EQ(outcome.code, 5) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("rank 1 of 3"));
    EXPECT_THAT(outcome.err, HasSubstr("was stopped by SIGSTOP"));
    EXPECT_THAT(outcome.err, HasSubstr("held up the others"));
    EXPECT_THAT(outcome.err, HasSubstr("it was stopped by SIGSTOP; kill -CONT would have resumed it"));
    EXPECT_THAT(outcome.err, Not(HasSubstr("failed first"))) << backend;
  }
}

// Steps of a second or more, of which it takes up to two.
TEST(Launched, AStopWaitsForTheEndOfLongSteps) {
  const TemporaryDirectory directory;
  const auto outcome = run(
      "lockstep launch -n 2 -- lockstep train resnet18-cifar --data random:3x32x32,4000 --batch 64 --threads 1 --steps "
      "100 --quiet --metrics m.jsonl --checkpoint-dir c --checkpoint-every 0 & pid=$!; "
      "until grep -q event.:.step m.jsonl 2>/dev/null; do sleep 0.05; done; kill -TERM $pid; wait $pid",
      directory.path(), 150);
  EXPECT_EQ(outcome.code, 75) << outcome.err;
}

// As a scheduler suspends a job. All three at a time, each for twice its timeout; resumed one process after the other.
TEST(Launched, AJobThatIsStoppedAsAWholeContinues) {
  const TemporaryDirectory directory;
  const auto outcome = run(std::string(R"(
    stopped() {  # its backend, its environment, and what starts the rest
      mkdir $1; cd $1
      train="$3 lockstep train mlp --data digits --steps 100000000 --quiet --threads 1 --timeout-seconds 2
             --checkpoint-dir $PWD/c --checkpoint-every 0 --metrics m.jsonl --backend ${1%%-*}"
      if [ $1 = hosts ]; then
        env $2 RANK=1 LOCKSTEP_HOST_NAME=b $train >/dev/null 2>&1 &
        env $2 RANK=0 LOCKSTEP_HOST_NAME=a $train >/dev/null 2>said &
      else
        $train >/dev/null 2>said &
      fi
      job=$!
      for i in $(seq 400); do grep -q event.:.step m.jsonl 2>/dev/null && break; sleep 0.05; done
      all=$(pgrep -f "$PWD/c ")
      kill -STOP $all; sleep 4
      for process in $all; do kill -CONT $process; sleep 0.02; done
      sleep 0.7; kill -TERM $job; wait $job; code=$?; echo "$1 $(echo $all | wc -w) $code"; grep -h error said
    }
    stopped shm "" "lockstep launch -n 2 --" & stopped mpi "" "lockstep launch -n 2 --" &
    stopped hosts "WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=)") +
                               std::to_string(free_port()) + "\" \"\" & wait",
                           directory.path(), 90);
  for (const char* carrier : {"shm", "mpi", "hosts"})
    EXPECT_THAT(outcome.out, ContainsRegex(std::string(carrier) + " [2-9] 75\n")) << outcome.out << outcome.err;
}

}  // namespace
}  // namespace lockstep::testing
