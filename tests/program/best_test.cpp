// --save-best, --keep-best, --patience and --eval-steps: what is kept, when a run ends, across a resume and on several
// ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

/// Steps of the evaluations that were better than all before.
std::vector<int> best_steps(const Metrics& metrics) {
  std::vector<int> steps;
  for (const auto& evaluation : metrics.evaluations)
    if (evaluation.contains("best")) steps.push_back(evaluation["step"]);
  return steps;
}

double accuracy_of_file(const fs::path& directory) {
  run_well("lockstep eval cnn --data digits --threads 1 --weights w.safetensors --metrics e.jsonl", directory);
  return events_of(directory / "e.jsonl", "eval").back()["accuracy"];
}

// At this rate it gets worse again.
const std::string kWorsening =
    "lockstep train cnn --data digits --threads 1 --global-batch 64 --lr 0.02 --eval-steps 4 ";

TEST(SaveBest, KeepsTheBestEvaluationsWeightsOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2}) {
    const TemporaryDirectory directory;
    const Metrics metrics = metrics_of(
        on_ranks(ranks) + kWorsening + "--steps 16 --save-best accuracy --save w.safetensors", directory.path());
    ASSERT_EQ(metrics.evaluations.size(), 4u);
    double best = -1;
    int step = 0;
    for (const auto& evaluation : metrics.evaluations) {
      EXPECT_EQ(evaluation.contains("best"), evaluation["accuracy"] > best);
      if (evaluation["accuracy"] <= best) continue;
      best = evaluation["accuracy"];
      step = evaluation["step"];
    }
    EXPECT_LT(step, 16) << "nothing is tried where the last one is the best";
    EXPECT_EQ(metrics.final["best"]["metric"], "accuracy");
    EXPECT_EQ(metrics.final["best"]["value"], best);
    EXPECT_EQ(metrics.final["best"]["step"], step);
    EXPECT_EQ(metrics.final["gave_up"], false);
    EXPECT_EQ(accuracy_of_file(directory.path()), best);
  }
}

TEST(SaveBest, MayWantTheLeastOrTheLargest) {
  const TemporaryDirectory directory;
  const Metrics least = metrics_of(kWorsening + "--steps 24 --save-best loss --save w.safetensors", directory.path());
  const Metrics largest =
      metrics_of(kWorsening + "--steps 24 --save-best loss:max --save w.safetensors", directory.path());
  EXPECT_LT(least.final["best"]["value"], largest.final["best"]["value"]);
  EXPECT_EQ(best_steps(largest).front(), 4) << "the first one is better than none";
}

TEST(SaveBest, SavesTheMovingAverageThatWasEvaluated) {
  const TemporaryDirectory directory;
  const Metrics metrics =
      metrics_of(kWorsening + "--steps 24 --ema 0.9 --save-best accuracy --save w.safetensors", directory.path());
  for (const auto& evaluation : metrics.evaluations)
    EXPECT_TRUE(evaluation.contains("ema") || !evaluation.contains("best"));
  EXPECT_EQ(accuracy_of_file(directory.path()), metrics.final["best"]["value"]);
}

// As a run that is killed between two checkpoints, one of them after its best evaluation.
TEST(SaveBest, IsRememberedByARunThatResumes) {
  const TemporaryDirectory whole, parts;
  const std::string line = kWorsening + "--save-best accuracy --patience 4 --save w.safetensors --checkpoint-dir c ";
  const Metrics uninterrupted = metrics_of(line + "--steps 60 --checkpoint-every 10", whole.path());
  metrics_of(line + "--steps 20 --checkpoint-every 10", parts.path());
  const Metrics resumed = metrics_of(line + "--steps 60 --checkpoint-every 10 --resume auto", parts.path());
  EXPECT_EQ(resumed.final["best"], uninterrupted.final["best"]);
  EXPECT_EQ(resumed.final["steps"], uninterrupted.final["steps"]);
  EXPECT_EQ(resumed.final["params_sha256"], uninterrupted.final["params_sha256"]);
  EXPECT_EQ(accuracy_of_file(parts.path()), accuracy_of_file(whole.path()));
}

TEST(SaveBest, BeginsAnewWithoutItsFile) {
  const TemporaryDirectory directory;
  const std::string line = kWorsening + "--save-best accuracy --save w.safetensors --checkpoint-dir c ";
  metrics_of(line + "--steps 16", directory.path());
  fs::remove(directory.path() / "w.safetensors");
  const auto outcome = run_well(line + "--steps 20 --resume auto", directory.path());
  EXPECT_THAT(outcome.err, ::testing::HasSubstr("w.safetensors does not have the best weights"));
  EXPECT_TRUE(fs::exists(directory.path() / "w.safetensors"));
}

std::vector<std::int64_t> steps_in(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  for (const auto& entry : fs::directory_iterator(directory))
    if (const std::string name = entry.path().filename(); name.starts_with("step-"))
      steps.push_back(std::stoll(name.substr(5)));
  std::ranges::sort(steps);
  return steps;
}

// The newest, and those of the best evaluations, also of a run that resumes in between.
TEST(KeepBest, KeepsTheCheckpointsOfTheBestEvaluations) {
  for (const int ranks : {1, 2}) {
    const TemporaryDirectory whole, parts;
    const std::string line = on_ranks(ranks) + kWorsening + "--save-best accuracy:min --keep-best 2 --keep 1 --zero " +
                             (ranks > 1 ? "1" : "0") + " --checkpoint-dir c --checkpoint-every 6 ";
    const Metrics metrics = metrics_of(line + "--steps 32", whole.path());
    auto evaluations = metrics.evaluations;
    evaluations.pop_back();  // its checkpoint is the newest
    std::ranges::stable_sort(evaluations, {},
                             [](const auto& evaluation) { return evaluation["accuracy"].template get<double>(); });
    std::vector<std::int64_t> wanted = {evaluations[0]["step"], evaluations[1]["step"], 32};
    std::ranges::sort(wanted);
    EXPECT_LT(wanted[1], 28) << "nothing is tried where they are the newest";
    EXPECT_EQ(steps_in(whole.path() / "c"), wanted);
    metrics_of(line + "--steps 18", parts.path());
    metrics_of(line + "--steps 32 --resume auto", parts.path());
    EXPECT_EQ(steps_in(parts.path() / "c"), wanted);
  }
}

TEST(Patience, EndsARunThatGetsNoBetter) {
  for (const int ranks : {1, 3}) {
    const TemporaryDirectory directory;
    const std::string line = on_ranks(ranks) +
                             "lockstep train cnn --data digits --threads 1 --global-batch 60 --lr 0 --eval-steps 2 "
                             "--steps 40 --patience 3 --checkpoint-dir c --save w.safetensors";
    const auto outcome = run_well(line + " --metrics m.jsonl", directory.path());
    EXPECT_THAT(outcome.out, ::testing::HasSubstr("at step 2: none of the evaluations since was better"));
    const Metrics metrics = read_metrics(directory.path() / "m.jsonl");
    EXPECT_EQ(metrics.evaluations.size(), 4u);
    EXPECT_EQ(metrics.final["steps"], 8);
    EXPECT_EQ(metrics.final["gave_up"], true);
    EXPECT_TRUE(fs::exists(directory.path() / "w.safetensors")) << "the last step's, without --save-best";
    // It has ended, and stays so.
    const Metrics again = metrics_of(line + " --resume auto", directory.path());
    EXPECT_EQ(again.final["steps"], 8);
    EXPECT_EQ(again.final["params_sha256"], metrics.final["params_sha256"]);
  }
}

}  // namespace
}  // namespace lockstep::testing
