#include "ddp/bucket_tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

namespace lockstep::ddp {
namespace {

using ::testing::ElementsAre;

constexpr std::size_t kMib = std::size_t{1} << 20;

// Runs steps that take `seconds(bytes, number of the step)` until the choice.
BucketChoice tune(const std::vector<std::size_t>& sizes, std::size_t preferred,
                  const std::function<double(std::size_t, std::size_t)>& seconds) {
  BucketTuner tuner(sizes, preferred);
  std::size_t step = 0;
  while (!tuner.done() && step < 1000)
    if (tuner.add_step(seconds(tuner.bytes(), step++))) tuner.settle(tuner.medians());
  EXPECT_TRUE(tuner.done());
  return tuner.choice();
}

std::vector<SlotSpec> slots_of_mib(std::initializer_list<std::size_t> mib) {
  std::vector<SlotSpec> slots;
  for (const auto one : mib) slots.push_back({"p" + std::to_string(slots.size()), one * kMib / 4, DType::kF32});
  return slots;
}

std::vector<std::size_t> tried(const std::vector<SlotSpec>& slots, const BucketLimits& limits) {
  std::vector<std::size_t> order(slots.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  auto sizes = sizes_to_try(slots, order, limits);
  for (std::size_t& size : sizes) size /= kMib;
  return sizes;
}

TEST(BucketTuner, ChoosesTheSizeWithTheShortestSteps) {
  const std::vector<std::size_t> sizes = {1, 2, 4, 8, 16, 25, 32, 64};
  for (const std::size_t best : sizes) {
    const auto choice = tune(sizes, 25, [&](std::size_t bytes, std::size_t) { return bytes == best ? 1.0 : 1.5; });
    EXPECT_EQ(choice.bucket_bytes, best);
    EXPECT_EQ(choice.trials.size(), sizes.size());
    EXPECT_LE(choice.steps, 90u);
    for (const auto& trial : choice.trials) EXPECT_EQ(trial.step_seconds, trial.bucket_bytes == best ? 1.0 : 1.5);
  }
}

TEST(BucketTuner, FirstStepsAndOutliersDoNotCount) {
  std::size_t before = 0, since = 0;
  const auto choice = tune({1, 2, 3}, 3, [&](std::size_t bytes, std::size_t) {
    since = bytes == before ? since + 1 : 0;
    before = bytes;
    if (since == 0) return bytes == 2 ? 100.0 : 0.1;
    if (since == 2 && bytes == 2) return 50.0;  // an evaluation
    return bytes == 2 ? 1.0 : 1.2;
  });
  EXPECT_EQ(choice.bucket_bytes, 2u);
}

TEST(BucketTuner, SmallGainsChangeNothing) {
  const auto choose = [](double others) {
    return tune({1, 2, 4}, 4, [=](std::size_t bytes, std::size_t) { return bytes == 4 ? 1.0 : others; }).bucket_bytes;
  };
  EXPECT_EQ(choose(0.995), 4u);
  EXPECT_NE(choose(0.98), 4u);
}

TEST(BucketTuner, TheSlowestRankDecides) {
  BucketTuner tuner({1, 2}, 2);
  while (!tuner.done())
    if (tuner.add_step(tuner.bytes() == 1 ? 1.0 : 2.0)) {
      EXPECT_THAT(tuner.medians(), ::testing::UnorderedElementsAre(1.0, 2.0));
      // Of sizes in the order of medians().
      std::vector<double> slowest = tuner.medians();
      for (double& one : slowest) one = one == 1.0 ? 3.0 : 2.0;
      tuner.settle(slowest);
    }
  EXPECT_EQ(tuner.bytes(), 2u);
}

TEST(BucketTuner, OneSizeIsTheChoice) {
  const BucketTuner tuner({7}, 7);
  EXPECT_TRUE(tuner.done());
  EXPECT_EQ(tuner.bytes(), 7u);
  EXPECT_EQ(tuner.choice().steps, 0u);
}

TEST(BucketTuner, SizesThatGiveTheSameBucketsAreTriedOnce) {
  EXPECT_THAT(tried(slots_of_mib({3, 3, 3, 3}), {.bucket_bytes = 25 * kMib}), ElementsAre(1, 8, 25));
  EXPECT_THAT(tried(slots_of_mib({1, 1, 1, 1}), {.bucket_bytes = 25 * kMib}), ElementsAre(1, 2, 25));
  EXPECT_THAT(tried(slots_of_mib({1, 1, 1, 1}), {.bucket_bytes = 2 * kMib}), ElementsAre(1, 2, 4));
  EXPECT_THAT(tried(slots_of_mib({40, 40, 40}), {.bucket_bytes = 25 * kMib}), ElementsAre(25, 120));
  EXPECT_THAT(tried({}, {.bucket_bytes = 25 * kMib}), ElementsAre(25));
  EXPECT_THAT(tried({{"p", 1, DType::kF32}}, {.bucket_bytes = 25 * kMib}), ElementsAre(25));
}

TEST(BucketTuner, TheChoiceIsALine) {
  EXPECT_EQ(describe(BucketChoice{.bucket_bytes = 2'000'000,
                                  .trials = {{.bucket_bytes = 1'000'000, .step_seconds = 0.0405},
                                             {.bucket_bytes = 2'000'000, .step_seconds = 0.038}},
                                  .steps = 24}),
            "buckets of 2.0 MB, with which a step takes 38 ms (1.0 MB: 40.5), chosen in 24 steps");
  EXPECT_THAT(describe(BucketChoice{.bucket_bytes = 1'000'000, .trials = {}, .steps = 0}),
              ::testing::HasSubstr("resumed"));
  EXPECT_THAT(describe(BucketChoice{.bucket_bytes = 1'000'000, .trials = {{.bucket_bytes = 1'000'000}}, .steps = 0}),
              ::testing::HasSubstr("no other size"));
}

}  // namespace
}  // namespace lockstep::ddp
