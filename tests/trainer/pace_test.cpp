#include "trainer/pace.h"

#include <gtest/gtest.h>

namespace lockstep::trainer {
namespace {

/// A run on a clock of its own.
class PaceTest : public ::testing::Test {
 protected:
  void begin(const RunPlan& plan) {
    plan_ = plan;
    step_ = plan.first_steps;
    pace_.emplace(plan, now_);
  }
  void pass(double seconds) { now_ += duration_of(seconds); }
  void step(double seconds, std::int64_t samples = 10) {
    pass(seconds);
    pace_->step_ended(++step_, samples, now_);
  }
  void steps(int count, double seconds) {
    for (int i = 0; i < count; ++i) step(seconds);
  }
  void pause(Pace::Pause what, double seconds) {
    pace_->pause_begins(now_);
    pass(seconds);
    pace_->pause_ended(what, step_, now_);
  }
  void evaluation(double seconds) { pause(Pace::Pause::kEvaluation, seconds); }
  void checkpoint(double seconds) { pause(Pace::Pause::kCheckpoint, seconds); }
  double left() { return pace_->seconds_left(now_).value_or(-1); }

  RunPlan plan_;
  Clock::time_point now_{};
  std::int64_t step_ = 0;
  std::optional<Pace> pace_;
};

TEST_F(PaceTest, StepsAlone) {
  begin({.total_steps = 100, .steps_per_epoch = 10});
  EXPECT_FALSE(pace_->seconds_left(now_));
  EXPECT_EQ(pace_->samples_per_s(), 0);
  step(1);
  EXPECT_NEAR(left(), 99, 1e-6);
  EXPECT_NEAR(pace_->samples_per_s(), 10, 1e-6);
  steps(49, 1);
  EXPECT_NEAR(left(), 50, 1e-6);
  pass(0.25);  // in the middle of a step
  EXPECT_NEAR(left(), 49.75, 1e-6);
  pass(1000);  // which takes for ever
  EXPECT_EQ(left(), 0);
}

// Kernels are made then, and files are read for the first time.
TEST_F(PaceTest, AFirstStepIsForgotten) {
  begin({.total_steps = 102, .steps_per_epoch = 10});
  step(50);
  EXPECT_NEAR(left(), 101 * 50, 1e-6) << "nothing else is known";
  step(1);
  EXPECT_NEAR(left(), 100, 1e-6);
}

TEST_F(PaceTest, WhatIsOlderCountsLess) {
  begin({.total_steps = 10000, .steps_per_epoch = 10});
  steps(1000, 0.1);
  EXPECT_NEAR(pace_->samples_per_s(), 100, 1e-6);
  steps(20, 0.4);  // 8 s of 30
  EXPECT_LT(pace_->samples_per_s(), 100);
  EXPECT_GT(pace_->samples_per_s(), 50);
  steps(1000, 0.4);
  EXPECT_NEAR(pace_->samples_per_s(), 25, 0.1);
  EXPECT_NEAR(left(), 0.4 * (10000 - step_), 0.01 * left());
  // One of many does not move it much, and of long ones ten are remembered.
  const double before = pace_->samples_per_s();
  step(0.8);
  EXPECT_NEAR(pace_->samples_per_s(), before, 0.03 * before);
  steps(20, 600);
  EXPECT_NEAR(pace_->samples_per_s(), 10.0 / 600, 0.2 * 10 / 600);
}

TEST_F(PaceTest, EvaluationsAndCheckpointsAreTimedOnTheirOwn) {
  begin({.total_steps = 95,
         .steps_per_epoch = 10,
         .evaluate_every = 20,
         .evaluation_steps = 6,
         .checkpoint_every = 10,
         .checkpoint_at_end = true});
  steps(10, 1);
  // A third of six steps, after 20, 40, 60, 80 and 95. Nothing is known of checkpoints.
  EXPECT_NEAR(left(), 85 + 5 * 2, 1e-6);
  checkpoint(3);
  EXPECT_NEAR(left(), 85 + 5 * 2 + 9 * 3, 1e-6);  // after 20, 30, …, 90 and 95
  steps(10, 1);
  EXPECT_NEAR(left(), 75 + 5 * 2 + 9 * 3, 1e-6) << "both are due";
  checkpoint(3);
  evaluation(7);
  EXPECT_NEAR(left(), 75 + 4 * 7 + 8 * 3, 1e-6);
  EXPECT_NEAR(pace_->samples_per_s(), 10, 1e-6);
  steps(75, 1);
  EXPECT_NEAR(left(), 7 + 3, 1e-6);
  checkpoint(3);
  evaluation(7);
  EXPECT_EQ(left(), 0);
}

TEST_F(PaceTest, WithinAPauseTimeGoesOn) {
  begin({.total_steps = 20, .steps_per_epoch = 10, .evaluate_every = 10, .evaluation_steps = 3});
  steps(10, 1);
  pass(0.5);  // after the step, before the evaluation: the next step's
  evaluation(4);
  EXPECT_NEAR(left(), 10 + 4 - 0.5, 1e-6);
  pass(0.5);
  EXPECT_NEAR(left(), 10 + 4 - 1, 1e-6);
  pace_->step_ended(++step_, 10, now_);
  EXPECT_NEAR(pace_->samples_per_s(), 10, 1e-6) << "half a second before it, half a second after it";
}

// Evaluations after 6, 12, 18, …, 48 and 50, checkpoints after those and 4, 8, …: 12, 24, 36 and 48 are both.
TEST_F(PaceTest, CheckpointsOfEvaluationsAreCountedOnce) {
  begin({.total_steps = 50,
         .steps_per_epoch = 10,
         .evaluate_every = 6,
         .evaluation_steps = 3,
         .checkpoint_every = 4,
         .checkpoint_at_end = true,
         .checkpoint_evaluation = true});
  steps(4, 1);
  checkpoint(100);
  EXPECT_NEAR(left(), 46 + 9 * 1 + (11 + 8 - 4 + 1) * 100, 1e-6);
}

TEST_F(PaceTest, ResumedRunsCountWhatIsLeft) {
  begin({.first_steps = 40,
         .total_steps = 60,
         .steps_per_epoch = 10,
         .evaluate_every = 10,
         .evaluation_steps = 3,
         .checkpoint_every = 10,
         .checkpoint_at_end = true});
  evaluation(5);  // that was due
  EXPECT_FALSE(pace_->seconds_left(now_));
  step(1);
  EXPECT_NEAR(left(), 19 + 2 * 5, 1e-6);
}

TEST_F(PaceTest, OnlyAtTheEnd) {
  begin({.total_steps = 10, .steps_per_epoch = 10, .evaluation_steps = 3, .checkpoint_at_end = true});
  step(1);
  checkpoint(2);  // somebody wanted one
  EXPECT_NEAR(left(), 9 + 1 + 2, 1e-6);
}

TEST_F(PaceTest, EpochsThatWereWhole) {
  begin({.first_steps = 5, .total_steps = 100, .steps_per_epoch = 10});
  steps(5, 1);
  EXPECT_FALSE(pace_->epoch_seconds()) << "an earlier process has done a half";
  steps(10, 2);
  EXPECT_NEAR(pace_->epoch_seconds().value_or(0), 20, 1e-6);
  steps(4, 1);
  evaluation(9);
  EXPECT_NEAR(pace_->epoch_seconds().value_or(0), 20, 1e-6);
  steps(6, 1);
  EXPECT_NEAR(pace_->epoch_seconds().value_or(0), 10, 1e-6);
}

TEST_F(PaceTest, NumbersAtTheirLimits) {
  constexpr std::int64_t kHuge = 1'000'000'000'000;
  begin({.total_steps = kHuge,
         .steps_per_epoch = kHuge - 1,
         .evaluate_every = kHuge - 3,
         .evaluation_steps = 1,
         .checkpoint_every = kHuge - 1,
         .checkpoint_at_end = true,
         .checkpoint_evaluation = true});
  step(0);
  EXPECT_EQ(left(), 0);
  step(1);
  EXPECT_NEAR(left(), 1e12, 10);
}

}  // namespace
}  // namespace lockstep::trainer
