// The learning rate as a function of the step.
#pragma once

#include <cstdint>

#include "trainer/config.h"

namespace lockstep::trainer {

/// The course of the learning rate over a run of `total_steps`. A pure function; steps count from 0.
///   warm-up   lr · (step + 1) / warmup during the first `warmup` steps; then, with t in [0, 1) the share of the
///             remaining steps that is done:
///   constant  lr
///   cosine    min_lr + (lr − min_lr) · (1 + cos(π t)) / 2      (Loshchilov and Hutter, 2017)
///   step      lr / 10 after each third of the remaining steps, never below min_lr
class LearningRate {
 public:
  LearningRate(const TrainConfig& config, std::int64_t total_steps, int world_size = 1);
  double at(std::int64_t step) const;

 private:
  Schedule schedule_;
  double lr_, min_lr_;
  std::int64_t warmup_, total_steps_;
};

}  // namespace lockstep::trainer
