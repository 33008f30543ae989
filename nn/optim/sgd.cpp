// Stochastic gradient descent with momentum.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

UpdateMethod method_of(const SgdOptions& options) {
  check_usage(options.momentum >= 0, "SGD with a negative momentum");
  check_usage(!options.nesterov || options.momentum > 0, "Nesterov momentum without momentum", "set momentum above 0");
  return {.weight_decay = options.weight_decay,
          .momentum = options.momentum > 0 ? std::optional(options.momentum) : std::nullopt,
          .rule = [has_momentum = options.momentum > 0, nesterov = options.nesterov](double decay) -> UpdateRule {
            const auto weight_decay = static_cast<float>(decay);
            if (nesterov) return SgdNesterovRule{.weight_decay = weight_decay};
            if (has_momentum) return SgdMomentumRule{.weight_decay = weight_decay};
            return SgdRule{.weight_decay = weight_decay};
          },
          .rates = [](double lr, double, double momentum) -> std::array<double, StepControl::kRates> {
            return {lr, momentum};
          },
          .moments = options.momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{}};
}

}  // namespace

std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options,
                                    const std::vector<ParameterGroup>& groups, OptimizerShare share) {
  return std::make_unique<Optimizer>(std::move(parameters), method_of(options), groups, std::move(share));
}

const OptimizerFamily& sgd_family() {
  static const OptimizerFamily family = {
      .name = "sgd",
      .settings = {momentum_setting(0.9),
                   {.name = "nesterov",
                    .fallback = false,
                    .help = "Nesterov's momentum",
                    .role = SettingSpec::Role::kTraining,
                    .need = {.what = "a momentum above 0",
                             .otherwise = "the momentum is 0",
                             .holds = [](const Settings& all) { return all.number("momentum") > 0; }}}},
      .method =
          [](const Settings& settings, double weight_decay) {
            return method_of({.momentum = settings.number("momentum"),
                              .nesterov = settings.flag("nesterov"),
                              .weight_decay = weight_decay});
          },
      .leanest = "--momentum 0",
      .state = [](const Settings& settings) -> std::string {
        return settings.number("momentum") > 0 ? "sgd with momentum" : "sgd without momentum";
      }};
  return family;
}

}  // namespace lockstep::nn
