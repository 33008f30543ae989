// Adam (Kingma and Ba, 2015). Its weight decay is a part of the gradient: PyTorch's Adam, where AdamW's is decoupled.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
const OptimizerFamily& adam_family() {
  static const OptimizerFamily family = {
      .name = "adam",
      .settings = adam_settings(),
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const AdamConstants constants = adam_constants(settings);
        return {.weight_decay = weight_decay,
                .rule = [constants](double decay) -> UpdateRule {
                  return AdamRule::of(constants.beta1, constants.beta2, constants.eps, decay);
                },
                .rates = [](double lr, double) -> std::array<double, StepControl::kRates> {
                  return {lr, 1.0};
                },
                .corrections = {{{constants.beta1}, {constants.beta2, /*root=*/true}}},
                .moments = {"exp_avg", "exp_avg_sq"}};
      }};
  return family;
}

}  // namespace lockstep::nn
