// --shards: the same bits at any number of ranks, hosts and carriers, across a resume; and what it goes with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

struct Result {
  std::string params, weights;
  std::vector<double> losses;
  double loss = 0;  // of the evaluation

  friend bool operator==(const Result&, const Result&) = default;
};

Result result_of(const std::string& launch, const std::string& options) {
  const TemporaryDirectory directory;
  const auto outcome =
      run_well(launch + " lockstep train " + options + " --metrics m.jsonl --save w.safetensors", directory.path());
  if (outcome.code != 0) return {};
  const Metrics metrics = read_metrics(directory.path() / "m.jsonl");
  const std::string params = metrics.final["params_sha256"];
  EXPECT_THAT(outcome.out, HasSubstr("params_sha256 " + params + "\n"));
  return {.params = params,
          .weights = read_file(directory.path() / "w.safetensors"),
          .losses = metrics.losses,
          .loss = metrics.evaluations.back()["loss"]};
}

std::string launched(int ranks) { return "lockstep launch -n " + std::to_string(ranks) + " --"; }

// cnn and lstm by themselves; gpt with clipping and dropout; resnet18 with running statistics, and a last step in which
// most shards are empty.
TEST(Shards, TheSameBitsAtAnyNumberOfRanks) {
  const TemporaryDirectory texts;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i) + " of a text that repeats itself\n";
  write_file(texts.path() / "text.txt", text);
  const std::string reads = " --data text:" + (texts.path() / "text.txt").string();
  struct Case {
    std::string options;
    std::vector<int> ranks;
  };
  for (const Case& c :
       {Case{"cnn --data digits --epochs 1 --global-batch 64 --shards 8", {2, 3, 4, 5, 8}},
        Case{"cnn --data digits --steps 10 --global-batch 60 --shards 5 --tail pad", {3, 5}},
        Case{"cnn --data digits --mixup 0.4 --cutmix 1 --label-smoothing 0.1 --epochs 1 --global-batch 60 --shards 7",
             {2, 3, 7}},
        Case{"lstm --steps 5 --global-batch 16 --shards 8" + reads, {3, 5}},
        Case{"gpt --layers 2 --width 32 --heads 2 --context 32 --dropout 0.1 --clip-norm 0.5 --steps 5 --global-batch "
             "16 "
             "--shards 8" +
                 reads,
             {2, 5, 8}},
        Case{"resnet18-cifar --data random:3x16x16,35 --classes 10 --epochs 1 --global-batch 16 --shards 8", {3}}}) {
    const Result one = result_of(launched(1), c.options);
    ASSERT_EQ(one.params.size(), 64u);
    for (const int ranks : c.ranks)
      EXPECT_TRUE(result_of(launched(ranks), c.options) == one) << ranks << " ranks: " << c.options;
  }
}

TEST(Shards, TheSameBitsOverEveryCarrierAndInAnyBuckets) {
  const std::string options = "cnn --data digits --steps 12 --global-batch 64 --shards 7 ";
  const Result one = result_of("", options);
  EXPECT_TRUE(result_of(launched(3), options + "--bucket-mb 0.1 --first-bucket-mb 0.01") == one);
  EXPECT_TRUE(result_of(launched(3), options + "--backend mpi") == one);
  // 2 and 1 ranks; hosts of two that alternate; three hosts.
  for (const auto& [group, ranks] : {std::pair{"hosts2", 3}, {"hostsx", 5}, {"hosts1", 3}})
    EXPECT_TRUE(result_of("LOCKSTEP_TEST_GROUP=" + std::string(group) +
                              " " LOCKSTEP_SOURCE_DIR "/tests/support/run_ranks " + std::to_string(ranks),
                          options + "--bucket-mb 0.1") == one)
        << ranks << " ranks, " << group;
}

// Who computes how many of them is said, or found; the bits are those of one process.
TEST(Shards, ThatAreSharedOutUnequally) {
  const std::string options = "cnn --data digits --steps 24 --global-batch 64 --shards 8 ";
  const Result one = result_of("", options);
  for (const char* shares : {"speeds:1,3", "speeds:100,1", "auto"})
    EXPECT_TRUE(result_of(launched(2), options + "--balance " + shares) == one) << shares;
  EXPECT_TRUE(result_of(launched(3), options + "--zero 1 --workers 0 --balance speeds:1,2.5,1") == one);
  EXPECT_TRUE(result_of("LOCKSTEP_TEST_GROUP=hosts2 " LOCKSTEP_SOURCE_DIR "/tests/support/run_ranks 3",
                        options + "--balance speeds:2,1,3") == one);
}

// Each pass of rank 1 takes 30 ms longer.
TEST(Shards, ASlowRankGetsFewer) {
  const TemporaryDirectory directory;
  const OnTwoProcessors few;  // a rank with more computes all its shards at a time
  const std::string with_faulty = "PATH=$(dirname " FAULTY_PROGRAM "):$PATH; ",
                    options = " --steps 24 --batch 8 --shards 8 --quiet --metrics ";
  run_well(
      with_faulty + "LOCKSTEP_TEST_FAULT=slow:1:30 lockstep launch -n 2 -- faulty --balance auto" + options + "m.jsonl",
      directory.path());
  run_well(with_faulty + "faulty" + options + "one.jsonl", directory.path());
  EXPECT_EQ(read_metrics(directory.path() / "m.jsonl").final["params_sha256"],
            read_metrics(directory.path() / "one.jsonl").final["params_sha256"]);
  const auto balances = events_of(directory.path() / "m.jsonl", "balance");
  ASSERT_FALSE(balances.empty());
  const auto& last = balances.back();
  EXPECT_LT(last["shares"][1], last["shares"][0]) << last;
  EXPECT_EQ(last["shares"][0].get<int>() + last["shares"][1].get<int>(), 8);
}

TEST(Shards, ABatchIsThatOfAShard) {
  const Result one = result_of(launched(3), "cnn --data digits --steps 6 --shards 4 --batch 8");
  EXPECT_TRUE(result_of("", "cnn --data digits --steps 6 --shards 4 --global-batch 32") == one);
}

// What is computed at a time does not matter, nor does the rank that has more threads than its shards; the threads of
// a shard may: oneDNN's convolutions for AVX-512 sum weight gradients in another order.
TEST(Shards, ThreadsOfAShardAreItsIdentity) {
  const std::string options = "cnn --data digits --steps 8 --global-batch 60 --shards 6 ";
  const Result one = result_of("", options + "--threads 2");
  EXPECT_TRUE(result_of(launched(2), options + "--threads 2") == one);
  const bool with_avx512 = run("lockstep version", {}).out.find("computes with avx512") != std::string::npos;
  if (with_avx512) {
    EXPECT_FALSE(result_of("", options) == one);
  }
}

TEST(Shards, ResumeOnAnyNumberOfRanks) {
  const TemporaryDirectory directory;
  const std::string options =
      "lockstep train cnn --data digits --global-batch 16 "
      "--shards 5 --quiet --metrics m.jsonl --checkpoint-dir ck --checkpoint-every 0 "
      "--resume auto --steps ";
  for (const auto& [ranks, steps] : {std::pair{3, 2}, {1, 3}, {5, 5}})
    run_well(launched(ranks) + " " + options + std::to_string(steps), directory.path());
  const Result whole = result_of(launched(2), "cnn --data digits --global-batch 16 --shards 5 --steps 5");
  EXPECT_EQ(read_metrics(directory.path() / "m.jsonl").final["params_sha256"], whole.params);
  EXPECT_EQ(read_metrics(directory.path() / "m.jsonl").losses, whole.losses);

  for (const auto& [change, says] : {std::pair{"--shards 4", "shards 5 there and 4 here"},
                                     {"", "threads of a shard 1 there and none here; shards 5 there and 0 here"},
                                     {"--shards 5 --threads 2", "threads of a shard 1 there and 2 here"},
                                     {"--shards 5 --mixup 0.5", "mixup 0 there and 0.5 here"}})
    EXPECT_THAT(run("lockstep train cnn --data digits --global-batch 16 --steps 6 --checkpoint-dir ck --resume auto " +
                        std::string(change),
                    directory.path()),
                fails_with(6, says));
}

TEST(Shards, AreRefusedWhereTheyHaveNoMeaning) {
  const TemporaryDirectory directory;
  EXPECT_THAT(run("lockstep launch -n 3 -- lockstep train cnn --data digits --steps 1 --shards 2 --global-batch 8",
                  directory.path()),
              fails_with(2, "2 shards for 3 ranks", "start fewer ranks"));
}

}  // namespace
}  // namespace lockstep::testing
