#include "lockstep/nn/optim/grad_scaler.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

// Up to here f32, in which they are counted, has every integer.
constexpr std::int64_t kMostSteps = std::int64_t{1} << 24;

static_assert(static_cast<double>(LossScaleRule::kLeast) == GradScaler::kLeastScale);

float checked_scale(double scale) {
  const auto rounded = static_cast<float>(scale);
  if (!(scale >= GradScaler::kLeastScale) || !std::isfinite(rounded))
    throw UsageError(fmt::format("losses scaled by {}", scale), "give a positive number of f32, such as 65536");
  return rounded;
}

}  // namespace

GradScaler::GradScaler(Backend& backend, const Options& options)
    : backend_(backend), options_(options), numbers_(backend.empty({ScalerState::kSize})) {
  if (!(options.growth_factor > 1) || !(options.backoff_factor > 0 && options.backoff_factor < 1))
    throw UsageError(fmt::format("a scale of losses that grows by {} and falls by {}", options.growth_factor,
                                 options.backoff_factor),
                     "give a growth factor above 1, and a backoff factor between 0 and 1");
  if (options.growth_interval < 1 || options.growth_interval > kMostSteps)
    throw UsageError(fmt::format("a scale of losses that grows after {} steps", options.growth_interval),
                     fmt::format("give an interval from 1 to {}", kMostSteps));
  scale_ = numbers_.slice(ScalerState::kScale, ScalerState::kScale + 1);
  set_state({.scale = checked_scale(options.initial_scale)});
}

void GradScaler::update() {
  backend_.optim().update_loss_scale({.growth = static_cast<float>(options_.growth_factor),
                                      .backoff = static_cast<float>(options_.backoff_factor),
                                      .interval = static_cast<float>(options_.growth_interval),
                                      .dynamic = options_.dynamic},
                                     numbers_);
}

GradScaler::State GradScaler::state() const {
  std::array<float, ScalerState::kSize> numbers{};
  backend_.download(numbers_, std::as_writable_bytes(std::span(numbers)));
  return state_of(numbers);
}

GradScaler::State GradScaler::state_of(std::span<const float> numbers) {
  return {.scale = numbers[ScalerState::kScale],
          .good_steps = static_cast<std::int64_t>(numbers[ScalerState::kGoodSteps]),
          .skipped_steps = static_cast<std::int64_t>(numbers[ScalerState::kSkippedSteps])};
}

void GradScaler::set_state(const State& state) {
  for (const std::int64_t count : {state.good_steps, state.skipped_steps})
    if (count < 0 || count > kMostSteps)
      throw UsageError(fmt::format("{} steps of a scale of losses", count),
                       fmt::format("give counts from 0 to {}", kMostSteps));
  std::array<float, ScalerState::kSize> numbers{};
  numbers[ScalerState::kScale] = numbers[ScalerState::kLastScale] = checked_scale(static_cast<double>(state.scale));
  numbers[ScalerState::kGoodSteps] = static_cast<float>(state.good_steps);
  numbers[ScalerState::kSkippedSteps] = static_cast<float>(state.skipped_steps);
  backend_.upload(std::as_bytes(std::span(numbers)), numbers_);
}

}  // namespace lockstep::nn
