// --on-bad-batch: what one rank cannot train on costs a batch on all of them, and leaves no trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
      EXPECT_THAT(skipped[0]["causes"][0]["text"].get<std::string>(), HasSubstr(says));
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
                                              " and 8 more", "look at the data"));
  EXPECT_THAT(start("unreadable", 2, "--on-bad-batch skip:2", 60),
              fails_with(3, "has left out 2 batches already", "cannot read sample "));
  EXPECT_EQ(events("skipped").size(), 2u);
  EXPECT_THAT(start("nan", 2, "--on-bad-batch skip:1", 60), fails_with(7, "the loss is NaN at step "));
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
