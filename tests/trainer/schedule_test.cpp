#include <gtest/gtest.h>

#include "lockstep/trainer/config.h"

namespace lockstep::trainer {
namespace {

TrainConfig config_with(const char* schedule, std::int64_t warmup, double lr, double min_lr) {
  TrainConfig config;
  config.schedule = schedule;
  config.warmup = warmup;
  config.lr = lr;
  if (min_lr > 0) config.schedule_settings = {{"min-lr", min_lr}};
  return config;
}

TEST(LearningRate, ConstantStays) {
  const nn::LearningRate rate = schedule_of(config_with("constant", 0, 0.1, 0.0), 10);
  EXPECT_EQ(rate.at(0), 0.1);
  EXPECT_EQ(rate.at(9), 0.1);
}

TEST(LearningRate, WarmupRisesLinearlyAndIsNeverZero) {
  const nn::LearningRate rate = schedule_of(config_with("constant", 4, 0.8, 0.0), 10);
  EXPECT_DOUBLE_EQ(rate.at(0), 0.2);
  EXPECT_DOUBLE_EQ(rate.at(1), 0.4);
  EXPECT_DOUBLE_EQ(rate.at(3), 0.8);
  EXPECT_DOUBLE_EQ(rate.at(4), 0.8);
}

TEST(LearningRate, CosineGoesFromLrTowardsMinLr) {
  const nn::LearningRate rate = schedule_of(config_with("cosine", 0, 1.0, 0.2), 100);
  EXPECT_DOUBLE_EQ(rate.at(0), 1.0);
  EXPECT_NEAR(rate.at(50), 0.6, 1e-12);
  EXPECT_NEAR(rate.at(99), 0.2, 1e-3);
  EXPECT_DOUBLE_EQ(rate.at(100), 0.2);
  for (int step = 1; step < 100; ++step) EXPECT_LT(rate.at(step), rate.at(step - 1));
}

// What custom training loops write.
TEST(LearningRate, ByNameAndInShort) {
  const nn::LearningRate long_way = schedule_of(config_with("cosine", 5, 1.0, 0.2), 100);
  const nn::LearningRate in_short = nn::cosine(1.0, 100, 5, 0.2);
  const nn::LearningRate by_name = nn::make_schedule("cosine", 1.0, 100, 5, {{"min-lr", 0.2}});
  for (const int step : {0, 4, 5, 50, 99}) {
    EXPECT_EQ(in_short.at(step), long_way.at(step));
    EXPECT_EQ(by_name.at(step), long_way.at(step));
  }
  EXPECT_THROW(nn::make_schedule("cosin", 1.0, 100), UsageError);
  EXPECT_THROW(nn::make_schedule("cosine", -1.0, 100), UsageError);
  EXPECT_THROW(nn::make_schedule("constant", 1.0, 100, 0, {{"min-lr", 0.2}}), UsageError);
}

TEST(LearningRate, MomentumWaitsForTheWarmUp) {
  const nn::LearningRate rate = nn::make_schedule("one-cycle", 1.0, 30, 10, {{"cycle-momentum", {0.95, 0.85}}});
  EXPECT_DOUBLE_EQ(*rate.momentum_at(0), 0.95);
  EXPECT_DOUBLE_EQ(*rate.momentum_at(10), 0.95);
  EXPECT_DOUBLE_EQ(*rate.momentum_at(15), 0.85);
  EXPECT_DOUBLE_EQ(*rate.momentum_at(29), 0.95);
  EXPECT_FALSE(nn::cosine(1.0, 30).momentum_at(5));
}

TEST(LearningRate, CosineStartsAfterWarmup) {
  const nn::LearningRate rate = schedule_of(config_with("cosine", 10, 1.0, 0.0), 110);
  EXPECT_DOUBLE_EQ(rate.at(9), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(10), 1.0);
  EXPECT_NEAR(rate.at(60), 0.5, 1e-12);
}

TEST(LearningRate, StepFallsTenfoldAfterEachThird) {
  const nn::LearningRate rate = schedule_of(config_with("step", 0, 1.0, 0.05), 9);
  EXPECT_DOUBLE_EQ(rate.at(0), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(2), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(3), 0.1);
  EXPECT_DOUBLE_EQ(rate.at(6), 0.05);  // 0.01 would be below min_lr
}

TEST(LearningRate, LinearGoesFromLrToAShareOfIt) {
  TrainConfig config = config_with("linear", 10, 2.0, 0.0);
  const nn::LearningRate to_zero = schedule_of(config, 110);
  EXPECT_DOUBLE_EQ(to_zero.at(0), 0.2);
  EXPECT_DOUBLE_EQ(to_zero.at(10), 2.0);
  EXPECT_DOUBLE_EQ(to_zero.at(35), 1.5);
  EXPECT_NEAR(to_zero.at(109), 0.02, 1e-12);
  EXPECT_EQ(to_zero.at(110), 0.0);
  config.schedule_settings = {{"end-factor", 0.25}};
  const nn::LearningRate to_a_quarter = schedule_of(config, 110);
  EXPECT_DOUBLE_EQ(to_a_quarter.at(10), 2.0);
  EXPECT_DOUBLE_EQ(to_a_quarter.at(60), 1.25);
  EXPECT_DOUBLE_EQ(to_a_quarter.at(110), 0.5);
  EXPECT_DOUBLE_EQ(to_a_quarter.at(1000), 0.5);
  config.schedule_settings = {{"end-factor", 1.5}};
  EXPECT_THROW(schedule_of(config, 110), UsageError);
}

TEST(LearningRate, InverseSqrtFallsFromTheWarmupOn) {
  const nn::LearningRate of_warmup = nn::make_schedule("inverse-sqrt", 1.0, 1000, 100);
  EXPECT_DOUBLE_EQ(of_warmup.at(99), 1.0);
  EXPECT_DOUBLE_EQ(of_warmup.at(100), 1.0);
  EXPECT_DOUBLE_EQ(of_warmup.at(400), 0.5);  // 1 / sqrt(400 / 100), as in the paper
  const nn::LearningRate given = nn::make_schedule("inverse-sqrt", 1.0, 1000, 100, {{"timescale", 10}});
  EXPECT_DOUBLE_EQ(given.at(130), 0.5);
  const nn::LearningRate without = nn::make_schedule("inverse-sqrt", 1.0, 1000);
  EXPECT_DOUBLE_EQ(without.at(30'000), 0.5);
}

// Beyond the last step, as where a run lasts longer than it was meant to.
TEST(LearningRate, EndsWhereItEnds) {
  for (const nn::ScheduleFamily* const family : nn::schedule_families()) {
    const nn::LearningRate rate = nn::make_schedule(family->name, 1.0, 10);
    EXPECT_GE(rate.at(1000), 0.0) << family->name;
    EXPECT_LE(rate.at(1000), rate.at(9)) << family->name;
    EXPECT_GT(nn::make_schedule(family->name, 1.0, 0).at(0), 0.0) << family->name;
  }
}

TEST(LearningRate, AWarmupAsLongAsTheRun) {
  const nn::LearningRate rate = schedule_of(config_with("cosine", 20, 1.0, 0.0), 10);
  EXPECT_DOUBLE_EQ(rate.at(9), 0.5);
}

}  // namespace
}  // namespace lockstep::trainer
