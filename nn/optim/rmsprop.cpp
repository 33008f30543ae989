// RMSprop (Tieleman and Hinton, 2012), as PyTorch has it, uncentred.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

const OptimizerFamily& rmsprop_family() {
  static const OptimizerFamily family = {
      .name = "rmsprop",
      .settings = {momentum_setting(0.0),
                   {.name = "alpha",
                    .fallback = 0.99,
                    .help = "decay of the mean of squared gradients",
                    .role = SettingSpec::Role::kTraining,
                    .high = 1,
                    .placeholder = "A"},
                   {.name = "eps",
                    .fallback = 1e-8,
                    .help = "added to the root of the mean of squared gradients",
                    .role = SettingSpec::Role::kTraining,
                    .placeholder = "X"}},
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const double alpha = settings.number("alpha"), eps = settings.number("eps");
        const auto momentum = static_cast<float>(settings.number("momentum"));
        return {.weight_decay = weight_decay,
                .rule = [=](double decay) -> UpdateRule {
                  const RmspropRule plain = {.alpha = static_cast<float>(alpha),
                                             .rest = static_cast<float>(1.0 - alpha),
                                             .eps = static_cast<float>(eps),
                                             .weight_decay = static_cast<float>(decay)};
                  if (momentum > 0) return RmspropMomentumRule{.plain = plain, .momentum = momentum};
                  return plain;
                },
                .rates = [](double lr, double, double) -> std::array<double, StepControl::kRates> { return {lr}; },
                .moments = momentum > 0 ? std::vector<std::string>{"square_avg", "momentum_buffer"}
                                        : std::vector<std::string>{"square_avg"}};
      },
      .state = [](const Settings& settings) -> std::string {
        return settings.number("momentum") > 0 ? "rmsprop with momentum" : "rmsprop without momentum";
      }};
  return family;
}

}  // namespace lockstep::nn
