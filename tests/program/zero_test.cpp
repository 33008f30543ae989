// --zero 1: the same bits as without, over every carrier, in shards and across resumes; and what it goes with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <fstream>
#include <set>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

struct ZeroResult {
  std::string params, ema;
  std::vector<double> losses, norms;

  friend bool operator==(const ZeroResult&, const ZeroResult&) = default;
};

ZeroResult zero_result_in(const fs::path& directory, const std::string& line) {
  run_well(line + " --quiet --check-replicas 1 --metrics m.jsonl", directory);
  const Metrics metrics = read_metrics(directory / "m.jsonl");
  ZeroResult result = {.params = metrics.final["params_sha256"], .ema = {}, .losses = metrics.losses, .norms = {}};
  if (metrics.final.contains("ema_params_sha256")) result.ema = metrics.final["ema_params_sha256"];
  for (const auto& event : events_of(directory / "m.jsonl", "step"))
    if (!event["grad_norm"].is_null()) result.norms.push_back(event["grad_norm"]);
  return result;
}

ZeroResult zero_result_of(const std::string& line) {
  const TemporaryDirectory directory;
  return zero_result_in(directory.path(), line);
}

std::set<std::string> files_in(const fs::path& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
  return names;
}

/// What a checkpoint has, with its moments in so many parts; 0: in one file.
std::set<std::string> parts_and_others(int parts) {
  std::set<std::string> names = {"card.json", "weights.safetensors"};
  if (parts == 0) names.insert("optimizer.safetensors");
  for (int part = 0; part < parts; ++part)
    names.insert("optimizer-0000" + std::to_string(part) + "-of-0000" + std::to_string(parts) + ".safetensors");
  return names;
}

std::string on_zero_hosts(const std::string& kind, int ranks) {
  return "LOCKSTEP_TEST_GROUP=" + kind + " " LOCKSTEP_SOURCE_DIR "/tests/support/run_ranks " + std::to_string(ranks) +
         " ";
}

TEST(Zero, TheSameBitsAsWithout) {
  for (const int ranks : {1, 2, 3, 4})
    for (const std::string options :  // the last one is of a large model: on one number of ranks
         {"cnn --data digits --steps 20 --batch 10 --threads 1",
          "mlp --data digits --steps 8 --batch 10 --threads 1 --optimizer lamb --clip-norm 0.5 --bucket-mb 0.01 "
          "--first-bucket-mb 0.001 --ema 0.9",
          "cnn --data digits --steps 8 --global-batch 64 --threads 1 --optimizer lars --accumulate 2 --no-decay *.bias",
          "resnet18-cifar --data random:3x16x16,90 --classes 10 --steps 3 --batch 7 --threads 1 --find-unused"}) {
      if (options.starts_with("resnet") && ranks != 3) continue;
      const std::string line = on_ranks(ranks) + "lockstep train " + options;
      const ZeroResult without = zero_result_of(line);
      ASSERT_EQ(without.params.size(), 64u);
      ASSERT_FALSE(without.norms.empty());
      EXPECT_TRUE(zero_result_of(line + " --zero 1") == without) << ranks << " ranks: " << options;
    }
}

TEST(Zero, TheSameBitsOverEveryCarrier) {
  const std::string options =
      "lockstep train cnn --data digits --steps 6 --batch 10 --threads 1 --bucket-mb 0.05 --clip-norm 1 ";
  const std::string mpi = "lockstep launch -n 3 --mpi -- " + options + "--backend mpi ";
  EXPECT_TRUE(zero_result_of(mpi + "--zero 1") == zero_result_of(mpi));
  for (const auto& [kind, ranks] : {std::pair{"hosts2", 4}, {"hosts2", 3}, {"hosts1", 3}})
    EXPECT_TRUE(zero_result_of(on_zero_hosts(kind, ranks) + options + "--zero 1") ==
                zero_result_of(on_zero_hosts(kind, ranks) + options))
        << kind << " " << ranks;
}

TEST(Zero, ShardsKeepTheirBits) {
  for (const std::string options : {"--optimizer adamw", "--optimizer lamb --clip-norm 0.5"}) {
    const std::string line = "lockstep train cnn --data digits --steps 6 --global-batch 64 --shards 5 " + options;
    const ZeroResult one = zero_result_of(line);
    for (const int ranks : {1, 2, 3, 5})
      EXPECT_TRUE(zero_result_of(on_ranks(ranks) + line + " --zero 1") == one) << ranks << " ranks " << options;
  }
}

// A checkpoint has the moments in as many parts as ranks, or in one file, and any run resumes from any.
TEST(Zero, ResumesFromAndToAnything) {
  const std::string train =
      "lockstep train cnn --data digits --steps 12 --global-batch 60 --shards 4 --checkpoint-dir c --keep 0 "
      "--checkpoint-every 5 ";
  const TemporaryDirectory directory;
  const ZeroResult whole = zero_result_in(directory.path(), on_ranks(2) + train + "--zero 1");
  const auto checkpoint = [&](int step) {
    return directory.path() / "c" /
           ("step-" + std::string(step < 10 ? "000000000" : "00000000") + std::to_string(step));
  };
  EXPECT_EQ(files_in(checkpoint(5)), parts_and_others(2));
  run_well("lockstep checkpoint verify c", directory.path());
  for (const std::string how : {"1", "3 --zero 1", "2", "4 --zero 1"}) {
    if (fs::exists(checkpoint(5))) fs::remove_all(checkpoint(10));
    fs::remove_all(checkpoint(12));
    const std::string again = on_ranks(how[0] - '0') + train + how.substr(1) + " --resume auto";
    EXPECT_TRUE(zero_result_in(directory.path(), again).params == whole.params) << how;
    const int parts = how.find("zero") == std::string::npos ? 0 : how[0] - '0';
    EXPECT_EQ(files_in(checkpoint(12)), parts_and_others(parts)) << how;
    run_well("lockstep checkpoint verify c", directory.path());
    if (how == "3 --zero 1" || how == "2") fs::remove_all(checkpoint(5));  // from here on from that of step 10
  }
}

// A part that is cut or missing is a checkpoint that is not whole, for all who read it.
TEST(Zero, APartThatIsNotWhole) {
  const TemporaryDirectory directory;
  const std::string train =
      "lockstep train cnn --data digits --steps 12 --global-batch 60 --threads 1 --checkpoint-dir c --keep 0 "
      "--checkpoint-every 5 --quiet ";
  run_well(on_ranks(3) + train + "--zero 1", directory.path());
  const fs::path last = directory.path() / "c" / "step-0000000012",
                 part = last / "optimizer-00001-of-00003.safetensors";
  const auto bytes = fs::file_size(part);
  const auto refusal = [&](const char* what) {
    for (const int ranks : {1, 2})
      EXPECT_THAT(run(on_ranks(ranks) + train + "--zero 1 --resume c/step-0000000012", directory.path()),
                  fails_with(6, "optimizer-00001-of-00003.safetensors"))
          << what;
    // With other moments, too: everybody looks at everything.
    EXPECT_THAT(run(on_ranks(2) + train + "--resume c/step-0000000012", directory.path()),
                fails_with(6, "optimizer-00001-of-00003.safetensors"))
        << what;
    EXPECT_THAT(run("lockstep checkpoint verify c", directory.path()),
                fails_with(6, "1 of 3 checkpoints cannot be used"))
        << what;
  };
  fs::resize_file(part, 1000);
  refusal("cut");
  fs::resize_file(part, bytes);  // zeros
  refusal("changed");
  fs::remove(part);
  refusal("missing");
  const auto outcome = run_well(on_ranks(2) + train + "--zero 1 --resume auto", directory.path());
  EXPECT_THAT(outcome.err, HasSubstr("the one before it is taken"));
  EXPECT_EQ(files_in(last), parts_and_others(2)) << "it takes the place of what was corrupt";
}

// Ranks that see another directory under the same name: one file, as without.
TEST(Zero, RanksThatDoNotSeeTheDirectory) {
  if (::geteuid() != 0 || run("unshare -m true", "/").code != 0) GTEST_SKIP() << "mounting takes root's rights";
  const TemporaryDirectory directory, other;
  for (const auto* one : {&directory, &other})
    std::ofstream(one->path() / "on-a-host")
        << "if [ $RANK = 2 ]; then\n"
           "  exec unshare -m sh -c 'mkdir -p c && mount -t tmpfs none c && exec \"$@\"' sh \"$@\"\n"
           "fi\n"
           "exec \"$@\"\n";
  const std::string train =
      "lockstep train cnn --data digits --global-batch 60 --threads 1 --zero 1 --checkpoint-dir c --keep 0 "
      "--checkpoint-every 5 ";
  const auto line = [&](const std::string& more) { return on_ranks(3) + "sh on-a-host " + train + more; };
  const auto outcome = run_well(line("--steps 10 --log-level debug"), directory.path());
  EXPECT_THAT(outcome.err, HasSubstr("rank 2 cannot write to rank 0's --checkpoint-dir c"));
  // Parameters, of 212 kB, and both of AdamW's moments.
  EXPECT_THAT(outcome.err, HasSubstr("moments 141.4 kB")) << "a third";
  EXPECT_THAT(outcome.err, HasSubstr("checkpoint 636.3 kB")) << "all of them";
  for (const char* step : {"step-0000000005", "step-0000000010"})
    EXPECT_EQ(files_in(directory.path() / "c" / step), parts_and_others(0));
  // And from one in parts, which that rank does not see either.
  const auto in_parts = run_well(on_ranks(3) + train + "--steps 5 --log-level debug", other.path());
  EXPECT_THAT(in_parts.err, HasSubstr("checkpoint 353.4 kB")) << "a third of them";
  EXPECT_EQ(files_in(other.path() / "c" / "step-0000000005"), parts_and_others(3));
  const ZeroResult one = zero_result_in(directory.path(), line("--steps 12 --resume auto"));
  const ZeroResult two = zero_result_in(other.path(), line("--steps 12 --resume auto"));
  EXPECT_EQ(one.params.size(), 64u);
  EXPECT_EQ(one.params, two.params);
}

TEST(Zero, TheMirrorHasTheSameCheckpoint) {
  const TemporaryDirectory directory;
  const std::string line =
      "lockstep train cnn --data digits --global-batch 60 --threads 1 --checkpoint-dir $PWD/c --checkpoint-mirror "
      "$PWD/m "
      "--zero 1 --quiet --resume auto --steps ";
  run_well(on_zero_hosts("hosts2", 4) + line + "6", directory.path());
  for (const char* file : {"weights.safetensors", "optimizer.safetensors"}) {
    const std::string one = read_file(directory.path() / "c" / "step-0000000006" / file);
    EXPECT_FALSE(one.empty());
    EXPECT_EQ(read_file(directory.path() / "m" / "step-0000000006" / file), one) << file;
  }
  fs::remove_all(directory.path() / "c");
  run_well(on_zero_hosts("hosts2", 4) + line + "8", directory.path());
  EXPECT_TRUE(fs::exists(directory.path() / "c" / "step-0000000008"));
}

// 5.8 million parameters, of which AdamW remembers 46 MB. What a rank has is counted by parallel_zero_test.
TEST(Zero, TheEstimateOfMemoryDividesMoments) {
  const TemporaryDirectory directory;
  const std::string line =
      "lockstep train mlp --hidden 2048,2048 --data random:1x28x28,64 --steps 1 --batch 8 --threads 1 --log-level "
      "debug ";
  EXPECT_THAT(run(on_ranks(2) + line, directory.path()).err, HasSubstr("moments 46.6 MB"));
  EXPECT_THAT(run(on_ranks(2) + line + "--zero 1", directory.path()).err, HasSubstr("moments 23.3 MB"));
}

TEST(Zero, RanksThatDifferAreNamed) {
  const TemporaryDirectory directory;
  EXPECT_THAT(
      run(on_ranks(2) + "sh -c \"lockstep train cnn --data digits --steps 2 --zero \\$RANK\"", directory.path()),
      fails_with(5, "zero"));
}

}  // namespace
}  // namespace lockstep::testing
