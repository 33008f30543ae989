// --audit: ranks that compute wrongly are named, and others are not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

class Audits : public ::testing::Test {
 protected:
  /// Of a training with this fault (tests/program/faulty.cpp).
  Outcome start(const std::string& fault, int ranks, const std::string& options) {
    return run("PATH=$(dirname " FAULTY_PROGRAM "):$PATH; LOCKSTEP_TEST_FAULT=" + fault + " lockstep launch -n " +
                   std::to_string(ranks) + " -- faulty --batch 8 --threads 1 --metrics m.jsonl --quiet " + options,
               directory_.path());
  }
  nlohmann::json final() { return events_of(directory_.path() / "m.jsonl", "final").back(); }

  TemporaryDirectory directory_;
};

// Of three ranks with two shards each: a pass is the 20th in step 10, or before it where steps are audited.
TEST_F(Audits, NameTheRankThatComputesWrongly) {
  for (const std::string fault : {"flip-weight", "flip-activation", "wrong-products"}) {
    SCOPED_TRACE(fault);
    for (const int rank : {0, 1, 2}) {
      const std::string name = std::to_string(rank);
      const auto outcome = start(fault + ":" + name + ":20", 3, "--shards 6 --steps 40 --audit 1");
      EXPECT_THAT(outcome, fails_with(4, "rank " + name + " (", "has computed other gradients of shard ",
                                      " do: its memory", "; all was right at step "));
    }
  }
}

TEST_F(Audits, OfTwoRanksWhoHasAnotherResultTheSecondTime) {
  EXPECT_THAT(start("flip-activation:1:40", 2, "--shards 4 --steps 40 --audit 1"),
              fails_with(4, "rank 1 (", "than it does the second time"));
  // It differs for good, before the step begins: from whom, neither can say.
  EXPECT_THAT(start("flip-weight:1:9", 2, "--shards 4 --steps 40 --audit 0.05"),
              fails_with(5, "have computed different gradients of shard ", "rank 0 (", "rank 1 ("));
}

// What is wrong for good is found in the next step that is audited, or before the next checkpoint.
TEST_F(Audits, ComeBeforeACheckpoint) {
  EXPECT_THAT(start("flip-weight:2:20", 3, "--shards 6 --steps 60 --audit 0.05"),
              fails_with(4, ": rank 2 (", "has computed other gradients"));
  EXPECT_THAT(
      start("flip-weight:2:20", 3, "--shards 6 --steps 60 --audit 0.001 --checkpoint-dir ck --checkpoint-every 8"),
      fails_with(4, "step 16: rank 2 (", "all was right at step 8"));
  EXPECT_TRUE(std::filesystem::exists(directory_.path() / "ck" / "step-0000000008"));
  EXPECT_FALSE(std::filesystem::exists(directory_.path() / "ck" / "step-0000000016"));
}

TEST_F(Audits, ChangeNothing) {
  for (const auto& [ranks, model] :
       {std::pair{3, "cnn --data digits --batch 4 --shards 7 --lr 0.01"},
        {2, "resnet18-cifar --data digits --batch 2 --shards 4 --threads 1"},
        {2,
         "gpt --data random:tokens,64 --batch 1 --shards 4 --dropout 0.1 --zero 1 --context 32 --width 32 --layers 2 "
         "--heads 2"},
        {2,
         "bert --data random:tokens,64 --batch 2 --shards 4 --context 128 --width 32 --layers 2 --heads 2 --recompute "
         "blocks"},
        {3, "mlp --data digits --batch 4 --shards 9 --balance speeds:3,1,2 --ema 0.9 --clip-norm 1"}}) {
    SCOPED_TRACE(model);
    std::vector<nlohmann::json> finals;
    for (const char* const audit : {"", " --audit 0.5"}) {
      ended_well(run("lockstep launch -n " + std::to_string(ranks) + " -- lockstep train " + model +
                         " --steps 6 --eval-every 0 --quiet --metrics m.jsonl" + audit,
                     directory_.path()));
      finals.push_back(final());
    }
    EXPECT_EQ(finals[0]["params_sha256"], finals[1]["params_sha256"]);
    EXPECT_FALSE(finals[0].contains("audits"));
    EXPECT_EQ(finals[1]["audits"], 3);
  }
}

TEST_F(Audits, OfOneRankAreNone) {
  const auto outcome = ended_well(start("none", 1, "--shards 2 --steps 2 --audit 1"));
  EXPECT_THAT(outcome.err, HasSubstr("nothing is audited"));
  EXPECT_FALSE(final().contains("audits"));
}

}  // namespace
}  // namespace lockstep::testing
