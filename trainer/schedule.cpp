#include "trainer/schedule.h"

namespace lockstep::trainer {

LearningRate::LearningRate(const TrainConfig& config, std::int64_t total_steps, int world_size)
    : schedule_(nn::schedule_family(config.schedule)),
      settings_(schedule_settings_of(config)),
      lr_(learning_rate_of(config, world_size)),
      warmup_(config.warmup),
      total_steps_(total_steps) {}

double LearningRate::at(std::int64_t step) const {
  if (step < warmup_) return lr_ * static_cast<double>(step + 1) / static_cast<double>(warmup_);
  const double done =
      total_steps_ > warmup_ ? static_cast<double>(step - warmup_) / static_cast<double>(total_steps_ - warmup_) : 0.0;
  return schedule_.at(done, lr_, settings_);
}

}  // namespace lockstep::trainer
