// Checkpoints that are on two hosts, and what they cost in the log.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/free_port.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kCnnOnHosts =
    "cnn --data digits --global-batch 60 --threads 1 --timeout-seconds 30 --metrics m.jsonl ";
const std::string kKeptInCk = "--checkpoint-dir ck --checkpoint-every 5 --keep 2 --resume auto ";

/// `lockstep train ARGUMENTS`, a rank on each of `hosts`, which are one machine that calls itself by several names.
/// `attempt`: of a launcher.
Outcome train_on(const std::vector<std::string>& hosts, const std::string& arguments, const fs::path& directory,
                 int attempt = 0) {
  std::string line = "export LOCKSTEP_ATTEMPT=" + std::to_string(attempt) + "; pids=(); ";
  const std::string port = std::to_string(free_port());
  for (std::size_t rank = 0; rank < hosts.size(); ++rank)
    line += "RANK=" + std::to_string(rank) + " WORLD_SIZE=" + std::to_string(hosts.size()) +
            " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port +
            " LOCKSTEP_JOB_SECRET=00112233445566778899aabbccddeeff LOCKSTEP_HOST_NAME=" + hosts[rank] +
            " lockstep train " + arguments + " & pids+=($!); ";
  return run(line + "code=0; for p in ${pids[@]}; do wait $p || code=$?; done; exit $code", directory);
}

std::string final_hash_in(const fs::path& directory) {
  return read_metrics(directory / "m.jsonl").final.value("params_sha256", "none");
}

bool same_files(const fs::path& directory) { return run("diff -r ck mirror", directory).code == 0; }

class CheckpointMirror : public ::testing::Test {
 protected:
  TemporaryDirectory directory_;
  const fs::path& path() const { return directory_.path(); }
  void write_text() const {
    std::ofstream text(path() / "text.txt");
    for (int i = 0; i < 600; ++i) text << "now " << i * i % 89 << " then ";
  }
};

TEST_F(CheckpointMirror, HasTheSameBytes) {
  write_text();
  const std::vector<std::string> runs = {
      kCnnOnHosts + "--steps 12 ",
      // Running statistics of each rank's own, of which rank 0's are the run's.
      "resnet18-cifar --data random:3x8x8,64 --global-batch 12 --steps 6 --tail drop --no-broadcast-buffers --threads "
      "1 --metrics "
      "m.jsonl ",
      "lstm --data text:text.txt --width 16 --context 16 --stateful --global-batch 12 --steps 12 --threads 1 --metrics "
      "m.jsonl ",
  };
  for (const std::string& arguments : runs) {
    for (const char* name : {"ck", "mirror"}) fs::remove_all(path() / name);
    ended_well(train_on({"a", "a", "b"}, arguments + kKeptInCk + "--checkpoint-mirror mirror", path()));
    EXPECT_TRUE(fs::exists(path() / "mirror" / "step-0000000005" / "weights.safetensors") ||
                fs::exists(path() / "mirror" / "step-0000000010" / "weights.safetensors"));
    EXPECT_TRUE(same_files(path())) << arguments;
  }
}

TEST_F(CheckpointMirror, NoLostDiskOrHostLosesAStep) {
  ended_well(train_on({"a", "b", "c"}, kCnnOnHosts + "--steps 40 ", path()));
  const std::string whole = final_hash_in(path());
  ASSERT_EQ(whole.size(), 64u);
  const std::string mirrored = kKeptInCk + "--checkpoint-mirror mirror ";
  const auto lose = [&](const char* name) { fs::remove_all(path() / name); };
  struct Loss {
    const char* directory;
    std::vector<std::string> hosts;  // that are there afterwards
  };
  // The third host had neither copy; all look into both directories, for this is one machine.
  for (const auto& loss : std::vector<Loss>{{"ck", {"a", "b", "c"}},
                                            {"mirror", {"a", "b", "c"}},
                                            {"ck", {"b", "c", "a"}},
                                            {"mirror", {"c", "a", "b"}}}) {
    lose("ck"), lose("mirror");
    ended_well(train_on({"a", "b", "c"}, kCnnOnHosts + "--steps 20 " + mirrored, path()));
    lose(loss.directory);
    const auto outcome = ended_well(train_on(loss.hosts, kCnnOnHosts + "--steps 40 " + mirrored, path()));
    EXPECT_THAT(outcome.out, HasSubstr("resuming at step 21"));
    EXPECT_EQ(final_hash_in(path()), whole);
    EXPECT_TRUE(same_files(path()));
  }
}

TEST_F(CheckpointMirror, TheNewestWholeOneOfAllIsTaken) {
  ended_well(train_on({"a", "b"}, kCnnOnHosts + "--steps 40 ", path()));
  const std::string whole = final_hash_in(path());
  const std::string mirrored = kKeptInCk + "--checkpoint-mirror b:mirror ";
  ended_well(train_on({"a", "b"}, kCnnOnHosts + "--steps 20 " + mirrored, path()));
  fs::resize_file(path() / "ck" / "step-0000000020" / "optimizer.safetensors", 1000);
  auto outcome = ended_well(train_on({"a", "b"}, kCnnOnHosts + "--steps 40 " + mirrored, path()));
  EXPECT_THAT(outcome.err, HasSubstr("ck/step-0000000020/optimizer.safetensors cannot be used"));
  EXPECT_THAT(outcome.out, HasSubstr("resuming at step 21, from mirror/step-0000000020"));
  EXPECT_EQ(final_hash_in(path()), whole);

  for (const char* name : {"ck", "mirror"})
    for (const auto& entry : fs::directory_iterator(path() / name)) fs::resize_file(entry.path() / "card.json", 10);
  EXPECT_THAT(train_on({"a", "b"}, kCnnOnHosts + "--steps 40 " + mirrored, path()),
              fails_with(6, "checkpoints in ck and mirror is whole"));
}

TEST_F(CheckpointMirror, OnOneHostTakesAnotherFileSystem) {
  ASSERT_NE(run("stat -c %d . /dev/shm | uniq | wc -l | grep -qx 1", path()).code, 0) << "TMPDIR is in /dev/shm";
  const TemporaryDirectory other("/dev/shm");
  const std::string mirror = (other.path() / "mirror").string();
  const std::string train = "lockstep train " + kCnnOnHosts + kKeptInCk + "--checkpoint-mirror " + mirror + " --steps ";
  run_well(train + "20", path());
  run_well("diff -r ck " + mirror, path());
  fs::remove_all(path() / "ck");
  EXPECT_THAT(run_well(train + "40", path()).out, HasSubstr("resuming at step 21"));
  run_well("diff <(ls ck) <(ls " + mirror + " | tail -n 2)", path());
}

TEST_F(CheckpointMirror, UselessMirrorsAreRefused) {
  for (const auto& [mirror, says] : std::vector<std::pair<std::string, std::string>>{
           {"a:mirror", "is on rank 0's host, and on the same file system there as --checkpoint-dir ck"},
           {"z:mirror", "no rank runs on host z → name one of a, b, or give the directory alone"},
           {"b:ck", "is the directory of --checkpoint-dir ck, which both hosts see"},
           {"ck", "is the directory of --checkpoint-dir ck, which both hosts see"},
           {"b:", "lacks a directory"},
           {":mirror", "lacks a host"}}) {
    EXPECT_THAT(train_on({"a", "b"}, kCnnOnHosts + kKeptInCk + "--steps 5 --checkpoint-mirror " + mirror, path()),
                fails_with(2, says, "--checkpoint-mirror " + mirror));
    EXPECT_FALSE(fs::exists(path() / "mirror")) << mirror;
  }
  EXPECT_THAT(run("lockstep train " + kCnnOnHosts + kKeptInCk + "--steps 5 --checkpoint-mirror mirror", path()),
              fails_with(2, "give a directory on another disk, or run on another host too"));
}

TEST_F(CheckpointMirror, AJobThatResumesHasTwoCopiesAgainAtOnce) {
  write_text();
  const std::string mirrored = "--checkpoint-dir ck --checkpoint-every 0 --checkpoint-mirror mirror --resume auto ";
  for (const std::string& arguments :
       {kCnnOnHosts + "--steps 12 ",
        std::string(
            "lstm --data text:text.txt --width 16 --context 16 --stateful --global-batch 12 --steps 12 --threads 1 "
            "--metrics m.jsonl ")})
    for (const char* lost : {"ck", "mirror"}) {
      for (const char* name : {"ck", "mirror"}) fs::remove_all(path() / name);
      ended_well(train_on({"a", "a", "b"}, arguments + mirrored, path()));
      run_well("cp -r ck before", path());
      fs::remove_all(path() / lost);
      ended_well(train_on({"a", "a", "b"}, arguments + mirrored, path()));
      EXPECT_TRUE(same_files(path())) << lost;
      EXPECT_EQ(run("diff -r ck before && rm -r before", path()).code, 0) << arguments << lost;
    }
}

// The launcher starts a job again on the hosts that are left.
TEST_F(CheckpointMirror, LostMirrorDoesNotEndARestartedJob) {
  const std::string arguments = kCnnOnHosts + kKeptInCk + "--checkpoint-mirror b:mirror --steps ";
  ended_well(train_on({"a", "b", "c"}, arguments + "10", path()));
  fs::remove_all(path() / "ck");
  EXPECT_EQ(train_on({"a", "c"}, arguments + "20", path()).code, 2);
  auto outcome = ended_well(train_on({"a", "c"}, arguments + "20", path(), 1));
  EXPECT_THAT(outcome.err, HasSubstr("no rank runs on host b; this attempt continues as it can"));
  EXPECT_THAT(outcome.out, HasSubstr("resuming at step 11"));
  EXPECT_TRUE(fs::exists(path() / "mirror" / "step-0000000020"));

  fs::remove_all(path() / "ck");
  EXPECT_EQ(train_on({"b"}, arguments + "30", path()).code, 2);
  outcome = ended_well(train_on({"b"}, arguments + "30", path(), 2));
  EXPECT_THAT(outcome.err, HasSubstr("on the same file system there"));
  EXPECT_THAT(outcome.out, HasSubstr("resuming at step 21"));
  EXPECT_TRUE(fs::exists(path() / "ck" / "step-0000000030"));
  EXPECT_FALSE(fs::exists(path() / "mirror" / "step-0000000030"));
}

TEST_F(CheckpointMirror, OfAnotherRunIsRefused) {
  const std::string arguments = kCnnOnHosts + "--steps 10 --checkpoint-dir ck --checkpoint-mirror mirror";
  ended_well(train_on({"a", "b"}, arguments, path()));
  fs::remove_all(path() / "ck");
  EXPECT_THAT(train_on({"a", "b"}, arguments, path()),
              fails_with(6, "mirror has a checkpoint of step 10, and this run does not resume"));
  EXPECT_TRUE(fs::exists(path() / "mirror" / "step-0000000010"));
}

TEST_F(CheckpointMirror, UnusableMirrorIsAWarning) {
  const std::string mirrored = kKeptInCk + "--checkpoint-mirror mirror ";
  ended_well(train_on({"a", "b"}, kCnnOnHosts + "--steps 10 " + mirrored, path()));
  fs::remove_all(path() / "mirror");
  std::ofstream(path() / "mirror") << "a disk that is gone";
  auto outcome = ended_well(train_on({"a", "b"}, kCnnOnHosts + "--steps 20 " + mirrored, path()));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("[rank 1 host b] warning: "), HasSubstr("training continues"),
                                 HasSubstr("3 checkpoints could not be written")));
  EXPECT_THAT(outcome.out, HasSubstr("resuming at step 11, from ck/step-0000000010"));

  // Nobody knows what was there.
  fs::remove_all(path() / "ck");
  EXPECT_THAT(train_on({"a", "b"}, kCnnOnHosts + "--steps 20 " + mirrored, path()),
              fails_with(6, "cannot read mirror: Not a directory"));
}

// One that is corrupt goes once there is a newer one; what is written again under its name stays.
TEST(CorruptCheckpoints, AreReplacedByTheSameStep) {
  const TemporaryDirectory directory;
  const std::string train =
      "lockstep train " + kCnnOnHosts + "--checkpoint-dir ck --checkpoint-every 5 --resume auto --steps ";
  run_well(train + "20", directory.path());
  fs::resize_file(directory.path() / "ck" / "step-0000000020" / "weights.safetensors", 100);
  run_well(train + "20", directory.path());
  run_well("lockstep checkpoint verify ck/step-0000000020", directory.path());
  fs::resize_file(directory.path() / "ck" / "step-0000000020" / "weights.safetensors", 100);
  run_well(train + "25", directory.path());
  EXPECT_EQ(run("ls ck | tr -d \"\\n\"", directory.path()).out, "step-0000000015step-0000000020step-0000000025");
}

TEST(CheckpointCost, IsInTheMetricsAndInTheLog) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train " + kCnnOnHosts + kKeptInCk + "--steps ";
  auto outcome = run_well(train + "22", directory.path());
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("step 5  checkpoint of 638."), HasSubstr("checkpoints: 5 of 638."),
                                 HasSubstr("kB in ck, "), HasSubstr("training stood still for ")));
  const auto steps_in = [&] {
    std::vector<int> steps;
    for (const auto& event : events_of(directory.path() / "m.jsonl", "checkpoint")) {
      steps.push_back(event["step"]);
      EXPECT_GT(event["bytes"], 600000);
      EXPECT_GT(event["write_ms"], 0);
      EXPECT_GT(event["held_up_ms"], 0);
    }
    return steps;
  };
  EXPECT_THAT(steps_in(), ::testing::ElementsAre(5, 10, 15, 20, 22));
  run_well(train + "30", directory.path());
  // Lines of later steps, and of what followed the step where it resumed, are taken off; so are lines after them.
  const auto steps = steps_in();
  ASSERT_GE(steps.size(), 2u);
  EXPECT_THAT(std::vector(steps.end() - 2, steps.end()), ::testing::ElementsAre(25, 30));
  EXPECT_EQ(json_in(lines_of(read_file(directory.path() / "m.jsonl")).back())["event"], "final");
}

TEST(CheckpointCost, IsNotSaidWithoutCheckpoints) {
  const TemporaryDirectory directory;
  const auto outcome = run_well("lockstep train " + kCnnOnHosts + "--steps 5", directory.path());
  EXPECT_THAT(outcome.out, Not(HasSubstr("checkpoint")));
}

}  // namespace
}  // namespace lockstep::testing
