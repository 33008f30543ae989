// What belongs to DistributedDataParallel, as people call it: launchers, accumulation, SyncBatchNorm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/free_port.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Ddp : public ::testing::Test {
 protected:
  /// `lockstep train ARGUMENTS` on `ranks` ranks.
  Metrics train(int ranks, const std::string& arguments) {
    run_well(
        fmt::format("{}lockstep train {} --quiet --check-replicas 1 --metrics m.jsonl", on_ranks(ranks), arguments),
        directory_.path());
    return metrics("m.jsonl");
  }
  Metrics metrics(const std::string& file) { return read_metrics(directory_.path() / file); }
  static void expect_near(const Metrics& got, const Metrics& wanted, double most, const std::string& what) {
    ASSERT_EQ(got.losses.size(), wanted.losses.size()) << what;
    for (std::size_t i = 0; i < got.losses.size(); ++i)
      EXPECT_LE(std::abs(got.losses[i] - wanted.losses[i]), most * wanted.losses[i]) << what << ", step " << i + 1;
  }

  TemporaryDirectory directory_;
};

TEST_F(Ddp, PartsOfAStepAreTheStep) {
  const std::string same = "cnn --data digits --global-batch 62 --steps 15";
  const Metrics whole = train(1, same);
  ASSERT_EQ(whole.losses.size(), 15U);
  for (const int ranks : {1, 2, 3, 4})
    expect_near(train(ranks, same + " --accumulate 4"), whole, 1e-5, fmt::format("{} ranks", ranks));
  expect_near(train(2, same + " --accumulate 64 --bucket-mb 0.001 --first-bucket-mb 0.001"), whole, 1e-5,
              "more parts than samples");
  // What is dropped depends on the sample, not on the part that it is in.
  const std::string dropping = "lstm --data digits --global-batch 24 --steps 6 --dropout 0.3 --layers 2 --width 16";
  expect_near(train(2, dropping + " --accumulate 3"), train(1, dropping), 1e-5, "dropout");
}

TEST_F(Ddp, ABatchIsOnePart) {
  const Metrics run = train(2, "mlp --data random:8,120 --batch 5 --accumulate 4 --epochs 1 --hidden 6");
  EXPECT_EQ(run.losses.size(), 3U);  // 120 / (2 · 4 · 5)
}

TEST_F(Ddp, SyncBatchNormIsOneProcess) {
  // 14 samples in steps of 6: the last one has two, and one rank none. Small steps: another order of sums may put an
  // activation next to 0 on the other side of a ReLU, which moves a gradient of norm 30 by 3e-4 of it.
  const std::string same =
      "resnet18-cifar --data random:3x16x16,14 --global-batch 6 --steps 3 --lr 1e-4 --sync-batchnorm --seed 3";
  const Metrics alone = train(1, same);
  const Metrics three = train(3, same);
  expect_near(three, alone, 1e-4, "3 ranks");
  // Evaluated with the running statistics.
  const auto wanted = alone.final["loss"].get<double>();
  EXPECT_NEAR(three.final["loss"].get<double>(), wanted, 1e-3 * wanted);
}

TEST_F(Ddp, OptionsThatChangeNothingWhereAllIsUsed) {
  const std::string same = "cnn --data digits --steps 10 --batch 8";
  const auto hash = train(2, same).final["params_sha256"];
  EXPECT_EQ(train(2, same + " --find-unused").final["params_sha256"], hash);
  EXPECT_EQ(train(2, same + " --static-graph").final["params_sha256"], hash);
  // Running statistics are for evaluation, and there they are rank 0's in either case.
  const std::string normed = "resnet18-cifar --data random:3x8x8,16 --global-batch 4 --steps 3";
  const auto sent = train(2, normed).final, kept = train(2, normed + " --no-broadcast-buffers").final;
  EXPECT_EQ(kept["params_sha256"], sent["params_sha256"]);
  EXPECT_EQ(kept["loss"], sent["loss"]);
}

TEST_F(Ddp, BlocksThatAreRecomputed) {
  for (const std::string& more : {std::string(), std::string(" --accumulate 2"), std::string(" --shards 3")}) {
    const std::string gpt =
        "gpt --data random:tokens,64 --layers 3 --heads 2 --width 32 --context 16 --dropout 0.1 --clip-norm 1 "
        "--global-batch 12 --steps 2" +
        more;
    const auto hash = train(2, gpt).final["params_sha256"];
    EXPECT_EQ(train(2, gpt + " --recompute blocks").final["params_sha256"], hash) << more;
    EXPECT_EQ(train(2, gpt + " --recompute 2").final["params_sha256"], hash) << more;
    // Statistics move once. It is large: two ranks of it in one of the three cases.
    const std::string resnet = "resnet18-cifar --data random:3x16x16,64 --global-batch 12 --steps 2" + more;
    const int ranks = more.empty() ? 2 : 1;
    EXPECT_EQ(train(ranks, resnet + " --recompute blocks").final["params_sha256"],
              train(ranks, resnet).final["params_sha256"])
        << more;
  }
  EXPECT_THAT(run("lockstep train gpt --data random:tokens,64 --layers 3 --context 16 --recompute 4", {}),
              fails_with(2, "--recompute 4: gpt has 3 blocks"));
}

TEST_F(Ddp, RanksThatAverageTheirParameters) {
  const std::string same =
      "lockstep launch -n 2 -- lockstep train cnn --data digits --batch 32 --epochs 6 --local-sgd 4 --check-replicas 4 "
      "--quiet --metrics m.jsonl";
  run_well(same, directory_.path());
  const Metrics wanted = metrics("m.jsonl");
  EXPECT_GT(wanted.final["accuracy"].get<double>(), 0.85);
  // It is another training than that on sums, and on one rank it is none: nothing is averaged.
  const std::string sums = "cnn --data digits --batch 32 --epochs 1";
  const auto sums_hash = train(1, sums).final["params_sha256"];
  run_well("lockstep train " + sums + " --local-sgd 2 --quiet --metrics m.jsonl", directory_.path());
  EXPECT_EQ(metrics("m.jsonl").final["params_sha256"], sums_hash);
  EXPECT_NE(train(2, "cnn --data digits --batch 32 --epochs 6").final["params_sha256"], wanted.final["params_sha256"]);
  // Stopped between two averagings it ends at the next one, and resumes to the same bits.
  const std::string saved = same + " --checkpoint-dir ck --checkpoint-every 8 --resume auto";
  const auto stopped = run("{ timeout --preserve-status -s TERM 0.6 " + saved + "; }", directory_.path());
  EXPECT_THAT(stopped.code, ::testing::AnyOf(75, 143, 0)) << stopped.err;
  run_well(saved, directory_.path());
  EXPECT_EQ(metrics("m.jsonl").final["params_sha256"], wanted.final["params_sha256"]);
}

TEST_F(Ddp, StartedAsTorchrunDoes) {
  const auto launched = run_well(
      "lockstep launch --nproc_per_node=4 -- lockstep train linear --data random:5,40 --epochs 1 "
      "--metrics a.jsonl",
      directory_.path());
  EXPECT_THAT(launched.out, HasSubstr("on 4 ranks"));
  const auto by_hand = run_well(
      fmt::format(
          "for rank in 3 2 1; do RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 "
          "MASTER_ADDR=127.0.0.1 MASTER_PORT={0} lockstep train linear --data random:5,40 --epochs 1 --quiet & done; "
          "RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT={0} "
          "lockstep train linear --data random:5,40 --epochs 1 --metrics b.jsonl && wait",
          free_port()),
      directory_.path());
  EXPECT_THAT(by_hand.out, HasSubstr("on 4 ranks"));
  EXPECT_EQ(metrics("a.jsonl").final["params_sha256"], metrics("b.jsonl").final["params_sha256"]);
}

TEST_F(Ddp, RanksWithOtherOptionsAreNamed) {
  EXPECT_THAT(
      run(fmt::format(
              "export WORLD_SIZE=2 MASTER_PORT={}; RANK=0 lockstep train linear --data random:5,40 --epochs 1 & "
              "RANK=1 lockstep train linear --data random:5,40 --epochs 1 --find-unused; code=$?; wait; exit $code",
              free_port()),
          directory_.path()),
      fails_with(5, "has find-unused=true where rank 0"));
}

// Trying sizes of buckets changes no bit; a run that is resumed on as many ranks tries none again.
TEST_F(Ddp, BucketsAreChosenOnce) {
  const std::filesystem::path directory = directory_.path();
  const auto ended = [&](int ranks, const std::string& options) {
    const auto outcome = run_well(
        on_ranks(ranks) + "lockstep train mlp --data digits --global-batch 12 --threads 1 " + options, directory);
    return outcome;
  };
  const auto sha256_in = [](const std::string& output) {
    const auto at = output.find("params_sha256 ");
    return at == std::string::npos ? "none in " + output : output.substr(at, 14 + 64);
  };
  const auto choosing = ended(2, "--steps 70 --bucket-mb auto --checkpoint-dir c");
  EXPECT_THAT(choosing.err,
              ContainsRegex("buckets of .* MB, with which a step takes .* ms \\(.*\\), chosen in [0-9]+ steps"));
  EXPECT_EQ(sha256_in(choosing.out), sha256_in(ended(2, "--steps 70").out));
  std::filesystem::copy(directory / "c", directory / "d", std::filesystem::copy_options::recursive);
  EXPECT_THAT(ended(2, "--steps 80 --bucket-mb auto --checkpoint-dir c --resume auto").err,
              AllOf(HasSubstr("as the run that is resumed has chosen"), Not(HasSubstr("chosen in"))));
  EXPECT_THAT(ended(3, "--steps 80 --bucket-mb auto --checkpoint-dir d --resume auto").err,
              HasSubstr("the run ended before --bucket-mb auto had chosen"));
  EXPECT_THAT(ended(1, "--steps 5 --bucket-mb auto").err, HasSubstr("no other size gives other buckets"));
}

}  // namespace
}  // namespace lockstep::testing
