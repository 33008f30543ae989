#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lockstep::trainer {

LearningRate::LearningRate(const TrainConfig& config, std::int64_t total_steps, int world_size)
    : schedule_(config.schedule),
      lr_(learning_rate_of(config, world_size)),
      min_lr_(config.min_lr),
      warmup_(config.warmup),
      total_steps_(total_steps) {}

double LearningRate::at(std::int64_t step) const {
  if (step < warmup_) return lr_ * static_cast<double>(step + 1) / static_cast<double>(warmup_);
  const double t =
      total_steps_ > warmup_ ? static_cast<double>(step - warmup_) / static_cast<double>(total_steps_ - warmup_) : 0.0;
  switch (schedule_) {
    case Schedule::kConstant: break;
    case Schedule::kCosine:
      return min_lr_ + (lr_ - min_lr_) * 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(t, 1.0)));
    case Schedule::kStep: return std::max(min_lr_, lr_ * std::pow(0.1, std::floor(3.0 * std::min(t, 0.999999))));
  }
  return lr_;
}

}  // namespace lockstep::trainer
