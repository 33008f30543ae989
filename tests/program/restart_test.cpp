// Trainings that are killed and resume by themselves, under the launcher; and what it refuses to restart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kTrain =
    "lockstep train cnn --data digits --global-batch 30 --steps 400 --quiet --threads 1 --metrics m.jsonl ";
const std::string kResumes = "--checkpoint-dir ck --checkpoint-every 5 --keep 2 --resume auto ";

std::string hash_in(const std::filesystem::path& directory) {
  return read_metrics(directory / "m.jsonl").final.value("params_sha256", "none");
}

/// A shell's words: `kill_one R N` kills rank R's program, of the launcher $pid, two checkpoints later, and waits for
/// the N-th attempt to make a step.
const std::string kKillOne =
    "newest() { ls ck 2>/dev/null | grep step | sort | tail -n 1; }\n"
    "newer() { from=$(newest); while [ \"$(newest)\" = \"$from\" ] && kill -0 $pid; do sleep 0.01; done; }\n"
    "program_of() { for w in $(pgrep -P $pid); do\n"
    "  tr \"\\0\" \"\\n\" </proc/$w/environ 2>/dev/null | grep -qx RANK=$1 && pgrep -P $w; done; }\n"
    "resumed() { grep -c resumed logs/restarts.jsonl; }\n"
    "kill_one() { newer; newer; kill -KILL $(program_of $1)\n"
    "  until [ $(resumed) -ge $2 ] || ! kill -0 $pid; do sleep 0.01; done; }\n";

TEST(Restarted, KilledRanksChangeNoBit) {
  for (const int ranks : {2, 3}) {
    const TemporaryDirectory whole, killed;
    const std::string launch = "lockstep launch -n " + std::to_string(ranks) + " ";
    run_well(launch + "-- " + kTrain, whole.path());
    const auto outcome = run_well(kKillOne + launch + "--max-restarts 20 --log-dir logs -- " + kTrain + kResumes +
                                      " & pid=$!; kill_one 0 1; kill_one 1 2; kill_one 0 3; kill_one 1 4; wait $pid",
                                  killed.path());
    EXPECT_EQ(hash_in(killed.path()), hash_in(whole.path()));
    EXPECT_EQ(hash_in(whole.path()).size(), 64u);
    EXPECT_EQ(read_metrics(killed.path() / "m.jsonl").losses.size(), 400u);
    const auto restarts = events_of(killed.path() / "logs" / "restarts.jsonl", "restart");
    ASSERT_EQ(restarts.size(), 4u) << outcome.err;
    for (const auto& restart : restarts) {
      EXPECT_EQ(restart["exit_code"], 137);
      EXPECT_EQ(restart["ranks"], ranks);
      EXPECT_GE(restart["from_step"], 5);
      EXPECT_EQ(restart["pause_seconds"], 0);
    }
    EXPECT_EQ(events_of(killed.path() / "logs" / "restarts.jsonl", "resumed").size(), 4u);
    EXPECT_THAT(outcome.err, HasSubstr("restart 4 of 20: rank 1 of " + std::to_string(ranks)));
  }
}

// The others keep their processes: no step is lost, and none is reported twice.
TEST(Restarted, InPlaceNoStepIsLost) {
  for (const int ranks : {2, 3}) {
    const TemporaryDirectory whole, killed;
    const std::string launch = "lockstep launch -n " + std::to_string(ranks) + " ";
    run_well(launch + "-- " + kTrain + "--ema 0.9 --patience 90", whole.path());
    const auto outcome =
        run_well(kKillOne + launch + "--max-restarts 20 --in-place --log-dir logs -- " + kTrain + kResumes +
                     "--ema 0.9 --patience 90 & pid=$!; kill_one 0 1; kill_one 1 2; wait $pid",
                 killed.path());
    const auto disturbed = read_metrics(killed.path() / "m.jsonl"),
               undisturbed = read_metrics(whole.path() / "m.jsonl");
    EXPECT_EQ(disturbed.final["params_sha256"], undisturbed.final["params_sha256"]);
    EXPECT_EQ(disturbed.final["ema_params_sha256"], undisturbed.final["ema_params_sha256"]);
    EXPECT_EQ(disturbed.losses, undisturbed.losses);
    EXPECT_EQ(disturbed.losses.size(), 400u);
    const auto history = killed.path() / "logs" / "restarts.jsonl";
    const auto replaced = events_of(history, "replace"), resumed = events_of(history, "resumed");
    ASSERT_EQ(replaced.size(), 2u) << outcome.err;
    ASSERT_EQ(resumed.size(), 2u);
    EXPECT_EQ(events_of(history, "restart").size(), 0u);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(replaced[i]["replaced"], std::vector<int>{static_cast<int>(i)});
      EXPECT_EQ(resumed[i]["step"].get<int>(), replaced[i]["after_step"].get<int>() + 1);
    }
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("restart 2 of 20 in place: rank 1 of " + std::to_string(ranks)),
                                   Not(HasSubstr("error:"))));
  }
}

// With parameters that do not move the first evaluation stays the best, and the run gives up when so many have
// followed.
TEST(Restarted, InPlaceEachEvaluationCountsOnce) {
  const std::string train = kTrain + "--lr 0 --weight-decay 0 --eval-steps 5 --patience 40 --save-best loss --save w ";
  const TemporaryDirectory whole, killed;
  run_well("lockstep launch -n 2 -- " + train, whole.path());
  run_well(kKillOne + "lockstep launch -n 2 --max-restarts 20 --in-place --log-dir logs -- " + train + kResumes +
               "& pid=$!; kill_one 1 1; kill_one 0 2; wait $pid",
           killed.path());
  EXPECT_EQ(events_of(killed.path() / "logs" / "restarts.jsonl", "replace").size(), 2u);
  const auto undisturbed = read_metrics(whole.path() / "m.jsonl").final;
  EXPECT_EQ(undisturbed["steps"], 205);
  EXPECT_EQ(read_metrics(killed.path() / "m.jsonl").final["steps"], undisturbed["steps"]);
}

TEST(Restarted, WhereNothingOutlivesARankOneLineSaysWhy) {
  const TemporaryDirectory directory;
  for (const auto& [ranks, flags, why] : std::vector<std::tuple<int, std::string, std::string>>{
           {2, "--zero 1", "--zero has each moment on one rank alone"},
           {2, "--comm-hook powersgd:2", "--comm-hook powersgd:2 keeps something on each rank"},
           {2, "--local-sgd 5", "--local-sgd has parameters that differ"},
           {1, "", "it has one rank"}}) {
    std::filesystem::remove_all(directory.path() / "ck");
    const auto outcome = run("lockstep launch -n " + std::to_string(ranks) +
                                 " --max-restarts 1 --in-place -- lockstep train cnn --data digits --steps 10 "
                                 "--threads 1 --checkpoint-dir ck --resume auto " +
                                 flags,
                             directory.path());
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.out + outcome.err, HasSubstr("--in-place changes nothing for this run: " + why));
  }
}

// Two failures without a checkpoint between: the job continues with a rank fewer, and in shards that changes no bit.
TEST(Restarted, InShardsFewerRanksChangeNoBit) {
  const TemporaryDirectory whole, killed;
  const std::string train =
      "lockstep train cnn --data digits --shards 4 --batch 8 --steps 1000 --quiet --metrics m.jsonl ";
  run_well("lockstep launch -n 2 -- " + train, whole.path());
  const auto outcome = run_well(
      kKillOne +
          "restarts() { cat logs/restarts.jsonl 2>/dev/null | grep -c lost_steps; }\n"
          "kill_soon() { until [ -n \"$(program_of 3)\" ] || ! kill -0 $pid; do sleep 0.01; done\n"
          "  kill -KILL $(program_of 3); until [ $(restarts) -ge $1 ] || ! kill -0 $pid; do sleep 0.01; done; }\n"
          "lockstep launch -n 4 --max-restarts 20 --min-ranks 1 --log-dir logs -- " +
          train +
          "--checkpoint-dir ck --checkpoint-every 0 --resume auto & pid=$!; kill_soon 1; kill_soon 2; wait $pid",
      killed.path());
  const auto restarts = events_of(killed.path() / "logs" / "restarts.jsonl", "restart");
  ASSERT_EQ(restarts.size(), 2u) << outcome.err;
  EXPECT_EQ(restarts[0]["ranks"], 4);
  EXPECT_EQ(restarts[1]["ranks"], 3);
  EXPECT_EQ(read_metrics(killed.path() / "m.jsonl").final["world_size"], 3);
  EXPECT_EQ(hash_in(killed.path()), hash_in(whole.path()));
}

TEST(Restarted, RepeatableFailureIsNotRestarted) {
  const TemporaryDirectory directory;
  const std::string launch = "lockstep launch -n 2 --max-restarts 5 -- ";
  for (const auto& [line, code] : {std::pair<std::string, int>{kTrain + kResumes + "--lr 1e30", 7},
                                   {kTrain + kResumes + "--bach 3", 2},
                                   {"lockstep train cnn --data mnist:/nowhere " + kResumes, 3}}) {
    std::filesystem::remove_all(directory.path() / "ck");
    const auto outcome = run(launch + line, directory.path());
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(Not(HasSubstr("restart 1 of")), HasSubstr("not restarted: exit code ")));
  }
}

TEST(Restarted, ATrainingThatCannotResumeIsRefused) {
  const TemporaryDirectory directory;
  for (const auto& [line, says] : std::vector<std::pair<std::string, std::string>>{
           {"--max-restarts 2 -- lockstep train cnn --data digits", "add --checkpoint-dir DIR --resume auto"},
           {"--max-restarts 2 -- lockstep train cnn --data digits --checkpoint-dir ck", "add --resume auto"},
           {"--max-restarts 2 --min-ranks 1 -- lockstep train cnn --data digits --checkpoint-dir ck --resume auto",
            "add --global-batch 64 to it (with --shards V the result has the same bits, too)"},
           {"--min-ranks 1 -- lockstep train cnn --data digits", "--min-ranks without --max-restarts"}}) {
    const auto outcome = run("lockstep launch -n 2 " + line, directory.path());
    EXPECT_EQ(outcome.code, 2) << line;
    EXPECT_THAT(outcome.err, HasSubstr(says));
    EXPECT_EQ(outcome.out, "");
  }
}

// The number of ranks that hosts take by themselves is for them to say: it may be above any --min-ranks.
TEST(Restarted, HostsWithoutSlotsNeedAGlobalBatchToo) {
  const TemporaryDirectory directory;
  const std::string train = " -- lockstep train cnn --data digits --checkpoint-dir ck --resume auto";
  for (const auto& [flags, says] :
       std::vector<std::pair<std::string, std::string>>{{"--hosts a,b --min-ranks 1", "add --global-batch G to it"},
                                                        {"--hosts a:2,b:1 --min-ranks 2", "add --global-batch 96"}}) {
    EXPECT_THAT(run("lockstep launch --max-restarts 2 " + flags + train, directory.path()), fails_with(2, says))
        << flags;
  }
}

// As on a host that does not see the disk on which the job has taken its checkpoints so far.
TEST(Restarted, JobWithACheckpointResumes) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train cnn --data digits --quiet --steps 30 " + kResumes;
  EXPECT_THAT(run("LOCKSTEP_CHECKPOINT_STEP=20 " + train, directory.path()),
              fails_with(6, "this job has taken a checkpoint of step 20, and ck on host ",
                         " has none → put --checkpoint-dir on a file system that all hosts share"));
  run_well(train, directory.path());
  EXPECT_THAT(run("LOCKSTEP_CHECKPOINT_STEP=31 " + train, directory.path()), fails_with(6, " has none after step 30"));
  run_well("LOCKSTEP_CHECKPOINT_STEP=30 " + train, directory.path());
  // One that is not whole explains why an older one is taken.
  const auto outcome = run_well("echo x >>ck/step-0000000030/weights.safetensors; LOCKSTEP_CHECKPOINT_STEP=30 " + train,
                                directory.path());
  EXPECT_THAT(outcome.err, HasSubstr("the one before it is taken"));
}

// The ranks that are the program itself need no mpirun, also where it is not there; those that want MPI do.
TEST(OwnRanks, NeedNoMpirun) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train cnn --data digits --steps 5 --quiet --metrics m.jsonl";
  const std::string without = "PATH=$(dirname $(command -v lockstep)); ";
  run_well(without + "lockstep launch -n 3 -- " + train, directory.path());
  const std::string hash = hash_in(directory.path());
  run_well("lockstep launch -n 3 --mpi -- " + train, directory.path());
  EXPECT_EQ(hash_in(directory.path()), hash);
  for (const std::string more : {" --backend mpi", " --backend=mpi"}) {
    EXPECT_THAT(run(without + "lockstep launch -n 2 -- " + train + more, directory.path()),
                fails_with(4, "no mpirun in PATH"));
  }
  // Other programs are started as well as it goes without.
  const auto outcome = run_well(without + "lockstep launch -n 2 -- /usr/bin/env", directory.path());
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0] RANK=0\n"), HasSubstr("[1] RANK=1\n"), HasSubstr("WORLD_SIZE=2\n")));
  EXPECT_THAT(outcome.err, HasSubstr("warning: there is no mpirun in PATH, so the ranks of /usr/bin/env are"));
}

}  // namespace
}  // namespace lockstep::testing
