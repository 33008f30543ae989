// --on-bad-batch: what one rank cannot train on costs a batch on all of them, and leaves no trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

class BadBatches : public ::testing::Test {
 protected:
  /// Of a training with this fault (tests/program/faulty.cpp) on rank 1.
  Outcome start(const std::string& fault, int ranks, const std::string& options, int steps = 20) {
    return run("PATH=$(dirname " FAULTY_PROGRAM "):$PATH; LOCKSTEP_TEST_FAULT=" + fault + ":1 lockstep launch -n " +
                   std::to_string(ranks) + " -- faulty --steps " + std::to_string(steps) +
                   " --threads 1 --metrics m.jsonl " + options,
               directory_.path());
  }
  std::vector<nlohmann::json> events(const char* kind) { return events_of(directory_.path() / "m.jsonl", kind); }

  TemporaryDirectory directory_;
};

// A batch that cannot be read is never computed; one with a NaN is, and nothing of it stays: parameters, moments, the
// optimizer's count and the average are the same.
TEST_F(BadBatches, CostABatchAndLeaveNoTrace) {
  for (const auto& [ranks, options] : {std::pair{2, "--ema 0.9"},
                                       {3, "--shards 6 --batch 8 --clip-norm 1"},
                                       {2, "--zero 1 --workers 0 --batch 8 --accumulate 2"}}) {
    SCOPED_TRACE(options);
    std::vector<nlohmann::json> finals;
    for (const auto& [fault, says] : {std::pair{"unreadable", "cannot read sample "}, {"nan", "is not finite"}}) {
      const auto outcome = ended_well(start(fault, ranks, options + std::string(" --on-bad-batch skip")));
      EXPECT_THAT(outcome.out, HasSubstr("1 step left out for bad batches"));
      const auto skipped = events("skipped");
      ASSERT_EQ(skipped.size(), 1u) << fault;
      EXPECT_EQ(skipped[0]["count"], 1);
      ASSERT_EQ(skipped[0]["causes"].size(), 1u) << skipped[0];
      EXPECT_EQ(skipped[0]["causes"][0]["rank"], 1);
      const std::string text = skipped[0]["causes"][0]["text"];
      EXPECT_THAT(text, HasSubstr(says));
      if (fault == std::string("nan")) {
        EXPECT_THAT(text, HasSubstr(", and before it the samples' numbers"));
      }
      EXPECT_EQ(events("step").size(), 19u);
      finals.push_back(events("final").back());
      EXPECT_EQ(finals.back()["skipped"], 1);
    }
    EXPECT_EQ(finals[0]["params_sha256"], finals[1]["params_sha256"]);
    EXPECT_EQ(finals[0]["ema_params_sha256"], finals[1]["ema_params_sha256"]);
    ended_well(start("none", ranks, options));
    EXPECT_NE(events("final").back()["params_sha256"], finals[0]["params_sha256"]);
  }
}

TEST_F(BadBatches, EndTheRunUnlessTheyMayBeLeftOut) {
  EXPECT_THAT(start("unreadable", 2, ""), fails_with(3, "cannot read sample ", "mend the disk"));
  EXPECT_THAT(start("nan", 2, ""), fails_with(7, "the loss is NaN at step ", ": that of rank 1, samples ",
                                              " and 8 more, and before it the samples' numbers", "look at the data"));
  EXPECT_THAT(start("unreadable", 2, "--on-bad-batch skip:2", 60),
              fails_with(3, "has left out 2 batches already", "cannot read sample "));
  EXPECT_EQ(events("skipped").size(), 2u);
  EXPECT_THAT(start("nan", 2, "--on-bad-batch skip:1", 60), fails_with(7, "the loss is NaN at step "));
}

// With a rate so high, the parameters of one step make the outputs of the next one infinite, on all ranks.
TEST_F(BadBatches, NameTheFirstLayerThatIsNotFinite) {
  EXPECT_THAT(
      run("lockstep launch -n 2 -- lockstep train mlp --data digits --lr 1e30 --optimizer sgd --threads 1 --quiet",
          directory_.path()),
      fails_with(7, "the loss is NaN at step "));
  EXPECT_THAT(run("lockstep train mlp --data digits --lr 1e30 --optimizer sgd --threads 1 --quiet", directory_.path()),
              fails_with(7, "the loss is ", ": that of rank 0, samples ", "and before it the output of fc2 (linear)"));
  EXPECT_THAT(
      run("lockstep train mlp --data digits --lr 1e30 --optimizer sgd --clip-norm 1 --shards 2 --threads 1 --quiet",
          directory_.path()),
      fails_with(7, "at step ", ": that of rank 0, samples "));
}

class Divergence : public BadBatches {
 protected:
  std::vector<std::int64_t> steps() {
    std::vector<std::int64_t> all;
    for (const auto& event : events("step")) all.push_back(event["step"]);
    return all;
  }
  static std::vector<std::int64_t> up_to(std::int64_t last) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(last));
    std::iota(all.begin(), all.end(), 1);
    return all;
  }
};

// The checkpoint's steps are repeated with the data that follow, and what is written has the bits of it.
TEST_F(Divergence, GoesBackAndContinuesWithTheDataThatFollow) {
  for (const char* more : {"--checkpoint-every 5", "--checkpoint-every 4 --zero 1 --ema 0.9",
                           "--checkpoint-every 5 --shards 4 --batch 8 --optimizer adamw --clip-norm 1"}) {
    SCOPED_TRACE(more);
    std::vector<nlohmann::json> finals;
    for (int times = 0; times < 2; ++times) {
      std::filesystem::remove_all(directory_.path() / "ck");
      const auto outcome = ended_well(
          start("nan", 2, std::string("--workers 0 --checkpoint-dir ck --on-divergence rewind ") + more, 30));
      const auto rewinds = events("rewind");
      ASSERT_FALSE(rewinds.empty());
      EXPECT_EQ(rewinds[0]["count"], 1);
      EXPECT_LT(rewinds[0]["to"], rewinds[0]["step"]);
      EXPECT_THAT(rewinds[0]["cause"].get<std::string>(), HasSubstr("the loss is NaN at step "));
      EXPECT_THAT(outcome.err, HasSubstr("with the data that follow, 1 of at most 3 times"));
      EXPECT_THAT(outcome.out, HasSubstr("after divergence"));
      EXPECT_EQ(steps(), up_to(30));
      finals.push_back(events("final").back());
      EXPECT_EQ(finals.back()["rewinds"], rewinds.size());
    }
    EXPECT_EQ(finals[0]["params_sha256"], finals[1]["params_sha256"]);
  }
}

TEST_F(Divergence, EndsTheRunOnceItHasGoneBackOftenEnough) {
  EXPECT_THAT(start("nan", 2, "--checkpoint-dir ck --checkpoint-every 10 --on-divergence rewind:1", 200),
              fails_with(7, "back to the newest checkpoint", "1 of at most 1 times", "the loss is NaN at step "));
}

// Running statistics are taken back on all ranks.
TEST_F(BadBatches, LeaveRunningStatisticsAsTheyWere) {
  std::string x("\x93NUMPY\x01\x00", 8), y = x;
  const auto add_header = [](std::string& file, std::string header) {
    header.resize(117, ' ');
    header += '\n';
    file += std::string("\x76\x00", 2) + header;
  };
  add_header(x, "{'descr': '<f4', 'fortran_order': False, 'shape': (64, 8, 8, 3), }");
  add_header(y, "{'descr': '<i8', 'fortran_order': False, 'shape': (64,), }");
  for (std::size_t sample = 0; sample < 64; ++sample) {
    for (std::size_t i = 0; i < 192; ++i) {
      const float value = sample == 11 && i == 5 ? std::numeric_limits<float>::quiet_NaN()
                                                 : static_cast<float>((sample * 7 + i * 5) % 13) / 13;
      x.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    const std::int64_t label = static_cast<std::int64_t>(sample % 3);
    y.append(reinterpret_cast<const char*>(&label), sizeof label);
  }
  directory_.write("x.npy", x);
  directory_.write("y.npy", y);
  const std::string train =
      "lockstep launch -n 2 -- lockstep train resnet18-cifar --data npy:x.npy,y.npy --threads 1 "
      "--epochs 2 --quiet --save w.safetensors --metrics m.jsonl ";
  for (const char* more : {"--batch 8", "--shards 4 --batch 4"}) {
    ended_well(run(train + more + " --on-bad-batch skip", directory_.path()));
    EXPECT_EQ(events("skipped").size(), 2u);  // one in each epoch
    ASSERT_FALSE(events("eval").empty());
    for (const auto& event : events("eval")) EXPECT_TRUE(event["loss"].is_number()) << event;
    const auto evaluated = ended_well(run(
        "lockstep eval resnet18-cifar --data npy:x.npy,y.npy --split val --weights w.safetensors", directory_.path()));
    EXPECT_EQ(evaluated.out.find("nan"), std::string::npos) << evaluated.out;
  }
}

}  // namespace
}  // namespace lockstep::testing
