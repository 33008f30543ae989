// Adagrad (Duchi, Hazan and Singer, 2011), as PyTorch has it.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

const OptimizerFamily& adagrad_family() {
  static const OptimizerFamily family = {
      .name = "adagrad",
      .settings = {{.name = "eps",
                    .fallback = 1e-10,
                    .help = "added to the root of the sum of squared gradients",
                    .role = SettingSpec::Role::kTraining,
                    .placeholder = "X"}},
      .lr = 1e-2,
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const auto eps = static_cast<float>(settings.number("eps"));
        return {.weight_decay = weight_decay,
                .rule = [eps](double decay) -> UpdateRule {
                  return AdagradRule{.eps = eps, .weight_decay = static_cast<float>(decay)};
                },
                .rates = [](double lr, double, double) -> std::array<double, StepControl::kRates> { return {lr}; },
                .moments = {"sum"}};
      }};
  return family;
}

}  // namespace lockstep::nn
