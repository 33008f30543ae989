#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/nn/optim/optimizers.h"

namespace lockstep::nn {
namespace {

SettingSpec min_lr() {
  return {.name = "min-lr",
          .fallback = 0.0,
          .help = "learning rate at the end",
          .role = SettingSpec::Role::kTraining,
          .placeholder = "X",
          .neutral = 0.0};
}

double constant(double, double lr, const Settings&) { return lr; }

// min_lr + (lr − min_lr) · (1 + cos(π t)) / 2 (Loshchilov and Hutter, 2017).
double cosine_at(double done, double lr, const Settings& settings) {
  const double least = settings.number("min-lr");
  return least + (lr - least) * 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(done, 1.0)));
}

// A tenth after each third, never below min_lr.
double step(double done, double lr, const Settings& settings) {
  return std::max(settings.number("min-lr"), lr * std::pow(0.1, std::floor(3.0 * std::min(done, 0.999999))));
}

// PyTorch's LinearLR(start_factor=1, end_factor, total_iters=the steps after warm-up):
// lr · (1 + (end_factor − 1) · t).
double linear(double done, double lr, const Settings& settings) {
  return lr * (1.0 + (settings.number("end-factor") - 1.0) * std::min(done, 1.0));
}

const Registry<ScheduleFamily>& schedule_registry() {
  static const ScheduleFamily rows[] = {
      {.name = "constant", .about = "as it is", .at = constant},
      {.name = "cosine", .about = "down to --min-lr along half a cosine", .settings = {min_lr()}, .at = cosine_at},
      {.name = "step", .about = "a tenth after each third of the steps", .settings = {min_lr()}, .at = step},
      {.name = "linear",
       .about = "linearly to --end-factor times itself",
       .settings = {{.name = "end-factor",
                     .fallback = 0.0,
                     .help = "factor of the learning rate at the end",
                     .role = SettingSpec::Role::kTraining,
                     .high = 1,
                     .placeholder = "F"}},
       .at = linear},
  };
  static const Registry<ScheduleFamily> schedules("schedule", [] {
    std::vector<const ScheduleFamily*> all;
    for (const auto& row : rows) all.push_back(&row);
    return all;
  }());
  return schedules;
}

}  // namespace

const std::vector<const ScheduleFamily*>& schedule_families() { return schedule_registry().all(); }
std::vector<std::string> schedule_names() { return schedule_registry().names(); }
const ScheduleFamily& schedule_family(const std::string& name) { return schedule_registry().named(name); }

LearningRate make_schedule(const std::string& name, double lr, std::int64_t total_steps, std::int64_t warmup,
                           const Settings& settings) {
  check_usage(lr >= 0 && total_steps >= 0 && warmup >= 0,
              "a learning-rate schedule with a negative rate or number of steps");
  const ScheduleFamily& family = schedule_family(name);
  return {family, resolve(family.settings, settings, "schedule " + name), lr, warmup, total_steps};
}

LearningRate cosine(double lr, std::int64_t total_steps, std::int64_t warmup, double min_lr) {
  return make_schedule("cosine", lr, total_steps, warmup, {{"min-lr", min_lr}});
}

double LearningRate::at(std::int64_t step) const {
  if (step < warmup_) return lr_ * static_cast<double>(step + 1) / static_cast<double>(warmup_);
  const double done =
      total_steps_ > warmup_ ? static_cast<double>(step - warmup_) / static_cast<double>(total_steps_ - warmup_) : 0.0;
  return schedule_.at(done, lr_, settings_);
}

}  // namespace lockstep::nn
