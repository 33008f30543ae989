// LAMB (You et al., 2020): Adam whose steps are as long as a parameter's norm says, for large batches.
#include "base/error.h"
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

// Constants of apex's FusedLAMB and timm's Lamb. Both clip all gradients to a norm of 1 by default, which is another
// setting here.
constexpr double kLambEps = 1e-6;
constexpr double kLambWeightDecay = 0.01;

std::vector<SettingSpec> lamb_settings() {
  auto all = adam_settings();
  for (SettingSpec& spec : all)
    if (spec.name == "eps") spec.fallback = kLambEps;
  all.push_back(always_adapt_setting());
  return all;
}

UpdateMethod lamb_method(const Settings& settings, double weight_decay) {
  const AdamConstants constants = adam_constants(settings);
  const bool always = settings.flag("always-adapt");
  check_adapts("lamb", "adam", weight_decay, always);
  return {
      .weight_decay = weight_decay,
      .rule = [constants, always](double decay) -> UpdateRule {
        return LambRule::of(constants.beta1, constants.beta2, constants.eps, decay, always || decay > 0);
      },
      .rates = [](double lr, double, double) -> std::array<double, StepControl::kRates> {
        return {lr, 1.0, 1.0};
      },
      .corrections = {{{}, {.beta = constants.beta1}, {.beta = constants.beta2, .kind = RateCorrection::kRootOfBias}}},
      .moments = {"exp_avg", "exp_avg_sq"}};
}

}  // namespace

const OptimizerFamily& lamb_family() {
  static const OptimizerFamily family = {
      .name = "lamb", .settings = lamb_settings(), .weight_decay = kLambWeightDecay, .method = lamb_method};
  return family;
}

}  // namespace lockstep::nn
