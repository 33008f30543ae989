// NAdam (Dozat, "Incorporating Nesterov Momentum into Adam", 2016). Weight decay is a part of the gradient, as in
// PyTorch.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {

const OptimizerFamily& nadam_family() {
  static const OptimizerFamily family = {
      .name = "nadam",
      .settings =
          [] {
            auto settings = adam_settings();
            settings.push_back({.name = "momentum-decay",
                                .fallback = 0.004,
                                .help = "exponent by which the momentum grows",
                                .role = SettingSpec::Role::kTraining,
                                .placeholder = "X"});
            return settings;
          }(),
      .lr = 2e-3,
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const AdamConstants constants = adam_constants(settings);
        const double momentum_decay = settings.number("momentum-decay");
        const auto nadam = [&](RateCorrection::Kind kind) {
          return RateCorrection{.beta = constants.beta1, .kind = kind, .decay = momentum_decay};
        };
        return {.weight_decay = weight_decay,
                .rule = [constants](double decay) -> UpdateRule {
                  return NadamRule::of(constants.beta1, constants.beta2, constants.eps, decay);
                },
                .rates = [](double lr, double, double) -> std::array<double, StepControl::kRates> {
                  return {lr, lr, 1.0};
                },
                .corrections = {{nadam(RateCorrection::kNadamGradient),
                                 nadam(RateCorrection::kNadamMoment),
                                 {.beta = constants.beta2, .kind = RateCorrection::kRootOfBias}}},
                .moments = {"exp_avg", "exp_avg_sq"}};
      }};
  return family;
}

}  // namespace lockstep::nn
