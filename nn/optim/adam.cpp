// Adam (Kingma and Ba, 2015), and AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019). Adam's own
// weight decay is a part of the gradient, as in PyTorch.
#include "lockstep/nn/optim/optimizers.h"

#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

/// Of the rates that Adam and AdamW have in common: the first moment's decay is that of the step.
RateCorrections bias_corrections(double beta2) {
  RateCorrections corrections;
  corrections.of[AdamRule::kRate] = {.beta_rate = AdamRule::kBeta1};
  corrections.of[AdamRule::kSecondScale] = {.beta = beta2, .kind = RateCorrection::kRootOfBias};
  return corrections;
}

UpdateMethod method_of(const AdamWOptions& options) {
  check_usage(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
              "AdamW's betas must lie in [0, 1)");
  check_usage(options.eps >= 0, "AdamW with a negative eps");
  const double beta2 = options.beta2;
  return {.weight_decay = options.weight_decay,
          .momentum = options.beta1,
          .rule = [rule = UpdateRule(AdamWRule::of(beta2, options.eps))](double) { return rule; },
          .rates = [](double lr, double weight_decay, double beta1) -> std::array<double, StepControl::kRates> {
            return {lr, beta1, 1.0 - beta1, 1.0, 1.0 - lr * weight_decay};
          },
          .corrections = bias_corrections(beta2),
          .moments = {"exp_avg", "exp_avg_sq"}};
}

}  // namespace

const OptimizerFamily& adam_family() {
  static const OptimizerFamily family = {
      .name = "adam",
      .settings = adam_settings(),
      .method = [](const Settings& settings, double weight_decay) -> UpdateMethod {
        const AdamConstants constants = adam_constants(settings);
        return {.weight_decay = weight_decay,
                .momentum = constants.beta1,
                .rule = [constants](double decay) -> UpdateRule {
                  return AdamRule::of(constants.beta2, constants.eps, decay);
                },
                .rates = [](double lr, double, double beta1) -> std::array<double, StepControl::kRates> {
                  return {lr, beta1, 1.0 - beta1, 1.0};
                },
                .corrections = bias_corrections(constants.beta2),
                .moments = {"exp_avg", "exp_avg_sq"}};
      }};
  return family;
}

std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options,
                                      const std::vector<ParameterGroup>& groups, OptimizerShare share) {
  return std::make_unique<Optimizer>(std::move(parameters), method_of(options), groups, std::move(share));
}

const OptimizerFamily& adamw_family() {
  static const OptimizerFamily family = {
      .name = "adamw",
      .settings = adam_settings(),
      .weight_decay = AdamWOptions().weight_decay,
      .method = [](const Settings& settings, double weight_decay) {
        const auto [beta1, beta2, eps] = adam_constants(settings);
        return method_of({.beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay});
      }};
  return family;
}

}  // namespace lockstep::nn
