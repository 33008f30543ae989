// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of an average moves parameters.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

const OptimizerFamily& lion_family() {
  static const OptimizerFamily family = {
      .name = "lion",
      .settings = {{.name = "betas",
                    .fallback = std::vector<double>{0.9, 0.99},
                    .help = "shares of the average in what moves, and in itself",
                    .role = SettingSpec::Role::kTraining,
                    .high = 1,
                    .open_high = true,
                    .placeholder = "A,B",
                    .least_many = 2,
                    .most_many = 2}},
      .lr = 1e-4,
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const double beta1 = settings.numbers("betas")[0], beta2 = settings.numbers("betas")[1];
        return {.weight_decay = weight_decay,
                .rule = [=](double) -> UpdateRule {
                  return LionRule{.beta1 = static_cast<float>(beta1),
                                  .rest1 = static_cast<float>(1.0 - beta1),
                                  .beta2 = static_cast<float>(beta2),
                                  .rest2 = static_cast<float>(1.0 - beta2)};
                },
                .rates = [](double lr, double decay, double) -> std::array<double, StepControl::kRates> {
                  return {lr, 1.0 - lr * decay};
                },
                .moments = {"exp_avg"}};
      }};
  return family;
}

}  // namespace lockstep::nn
