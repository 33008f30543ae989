// LARS (You et al., 2017): SGD with a rate for each parameter, of its norm and that of its gradient, for large batches.
#include "base/error.h"
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

// The rate, trust coefficient and eps of timm's Lars. Momentum is that of the paper and of --optimizer sgd. The weight
// decay is the one that ResNets are trained with; timm's is 0, with which it adapts nothing.
constexpr double kLarsRate = 1.0;
constexpr double kLarsTrust = 0.001, kLarsEps = 1e-8, kLarsMomentum = 0.9;
constexpr double kLarsWeightDecay = 1e-4;

std::vector<SettingSpec> lars_settings() {
  return {momentum_setting(kLarsMomentum),
          {.name = "trust-coefficient",
           .fallback = kLarsTrust,
           .help = "length of a step, as a share of the parameter's norm, at a learning rate of 1",
           .role = SettingSpec::Role::kTraining,
           .placeholder = "X"},
          {.name = "eps",
           .fallback = kLarsEps,
           .help = "added to the divisor of the parameter's norm",
           .role = SettingSpec::Role::kTraining,
           .placeholder = "X"},
          always_adapt_setting()};
}

UpdateMethod lars_method(const Settings& settings, double weight_decay) {
  const bool always = settings.flag("always-adapt");
  check_adapts("lars", "sgd", weight_decay, always);
  const auto trust = static_cast<float>(settings.number("trust-coefficient"));
  const auto eps = static_cast<float>(settings.number("eps"));
  const auto momentum = static_cast<float>(settings.number("momentum"));
  return {.weight_decay = weight_decay,
          .rule = [=](double decay) -> UpdateRule {
            const LarsRule plain = {
                .trust = trust, .eps = eps, .weight_decay = static_cast<float>(decay), .adapts = always || decay > 0};
            if (momentum > 0) return LarsMomentumRule{.plain = plain, .momentum = momentum};
            return plain;
          },
          .rates = [](double lr, double, double) -> std::array<double, StepControl::kRates> { return {lr}; },
          .moments = momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{}};
}

}  // namespace

const OptimizerFamily& lars_family() {
  static const OptimizerFamily family = {.name = "lars",
                                         .settings = lars_settings(),
                                         .lr = kLarsRate,
                                         .weight_decay = kLarsWeightDecay,
                                         .method = lars_method,
                                         .leanest = "--momentum 0",
                                         .state = [](const Settings& settings) -> std::string {
                                           return settings.number("momentum") > 0 ? "lars with momentum"
                                                                                  : "lars without momentum";
                                         }};
  return family;
}

}  // namespace lockstep::nn
