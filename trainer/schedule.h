// The learning rate as a function of the step.
#pragma once

#include <cstdint>

#include "nn/optim/optimizers.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// The learning rates of a run of `total_steps`. A pure function; steps count from 0. During the first `warmup` steps
/// lr · (step + 1) / warmup; then what the schedule says of the share of the remaining steps that is done.
class LearningRate {
 public:
  LearningRate(const TrainConfig& config, std::int64_t total_steps, int world_size = 1);
  double at(std::int64_t step) const;

 private:
  const nn::ScheduleFamily& schedule_;
  Settings settings_;
  double lr_;
  std::int64_t warmup_, total_steps_;
};

}  // namespace lockstep::trainer
