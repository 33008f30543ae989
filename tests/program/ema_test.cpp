// --ema: what is evaluated and saved, the same on any number of ranks, across a resume; and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

std::string value(const Metrics& metrics, const char* key) {
  return metrics.final.is_object() && metrics.final.contains(key) ? metrics.final[key].get<std::string>() : "none";
}

TEST(MovingAverage, IsEvaluatedBesideTheModelAndSaved) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train cnn --data digits --epochs 2 --threads 1 ";
  const Metrics without = metrics_of(train, directory.path());
  const Metrics with = metrics_of(train + "--ema 0.9 --save w.safetensors", directory.path());
  EXPECT_EQ(value(with, "params_sha256"), value(without, "params_sha256")) << "training itself stays as it is";
  EXPECT_EQ(value(without, "ema_params_sha256"), "none");
  EXPECT_EQ(value(with, "ema_params_sha256").size(), 64u);
  ASSERT_EQ(with.evaluations.size(), 4u);
  EXPECT_FALSE(with.evaluations[2].contains("ema"));
  EXPECT_EQ(with.evaluations[2]["loss"], without.evaluations[1]["loss"]);
  EXPECT_EQ(with.evaluations[3]["ema"], true);
  EXPECT_NE(with.evaluations[3]["loss"], with.evaluations[2]["loss"]);
  EXPECT_EQ(with.final["loss"], with.evaluations[3]["loss"]) << "the average's result is the run's";
  run_well("lockstep eval cnn --data digits --threads 1 --weights w.safetensors --metrics e.jsonl", directory.path());
  const auto loss = events_of(directory.path() / "e.jsonl", "eval").back()["loss"].get<double>();
  EXPECT_NEAR(loss, with.final["loss"].get<double>(), 1e-6) << "--save wrote the average";
}

TEST(MovingAverage, HasTheSameBitsInShardsOnAnyNumberOfRanks) {
  const std::string train = "lockstep train cnn --data digits --steps 10 --global-batch 64 --shards 4 --ema 0.95 ";
  std::string one;
  for (const int ranks : {1, 2, 3}) {
    const TemporaryDirectory directory;
    const Metrics metrics = metrics_of(on_ranks(ranks) + train, directory.path());
    if (ranks == 1) one = value(metrics, "ema_params_sha256");
    EXPECT_EQ(one.size(), 64u);
    EXPECT_EQ(value(metrics, "ema_params_sha256"), one) << ranks << " ranks";
  }
}

TEST(MovingAverage, ResumesToTheSameBits) {
  for (const std::string train :
       {"lockstep train cnn --data digits --steps 20 --global-batch 60 --threads 1 --ema 0.9 --freeze conv1.*",
        "lockstep train resnet18-cifar --data random:3x16x16,60 --classes 10 --steps 6 --batch 10 --ema 0.5",
        "lockstep train cnn --data digits --parallel dp --device cpu:0,1 --batch 50 --steps 12 --ema 0.9"}) {
    const TemporaryDirectory directory;
    const bool several = train.find("dp") == std::string::npos;
    const std::string line = on_ranks(several ? 2 : 1) + train + " --checkpoint-dir c --keep 0";
    const Metrics whole = metrics_of(line + " --checkpoint-every 3", directory.path());
    fs::path newest;
    for (const auto& entry : fs::directory_iterator(directory.path() / "c")) newest = std::max(newest, entry.path());
    fs::remove_all(newest);
    const Metrics resumed = metrics_of(line + " --checkpoint-every 0 --resume auto", directory.path());
    EXPECT_EQ(value(resumed, "params_sha256"), value(whole, "params_sha256"));
    EXPECT_EQ(value(resumed, "ema_params_sha256"), value(whole, "ema_params_sha256"));
    EXPECT_EQ(value(whole, "ema_params_sha256").size(), 64u);
    EXPECT_EQ(resumed.final["loss"], whole.final["loss"]);
  }
}

// A checkpoint's average is a weights file like any other.
TEST(MovingAverage, IsAFileOfACheckpoint) {
  const TemporaryDirectory directory;
  const std::string line =
      "lockstep train cnn --data digits --epochs 1 --threads 1 --checkpoint-dir c --resume auto --ema 0.9";
  const Metrics metrics = metrics_of(line, directory.path());
  run_well("lockstep eval cnn --data digits --threads 1 --weights c/$(ls c)/ema.safetensors --metrics e.jsonl",
           directory.path());
  EXPECT_NEAR(events_of(directory.path() / "e.jsonl", "eval").back()["loss"].get<double>(),
              metrics.final["loss"].get<double>(), 1e-6);
  run_well("lockstep checkpoint verify c", directory.path());
  fs::path checkpoint;
  for (const auto& entry : fs::directory_iterator(directory.path() / "c")) checkpoint = entry.path();
  // Another decay, or none, is another run.
  for (const char* other : {"--ema 0.8", ""}) {
    EXPECT_THAT(run("lockstep train cnn --data digits --epochs 1 --threads 1 --checkpoint-dir c --resume auto " +
                        std::string(other) + " --quiet",
                    directory.path()),
                fails_with(6, "moving average"))
        << other;
  }
  fs::resize_file(checkpoint / "ema.safetensors", 1000);
  EXPECT_THAT(run(line + " --quiet", directory.path()), fails_with(6, "ema.safetensors"));
  EXPECT_EQ(run("lockstep checkpoint verify c", directory.path()).code, 6);
}

}  // namespace
}  // namespace lockstep::testing
