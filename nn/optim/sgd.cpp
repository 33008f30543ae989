// Stochastic gradient descent with momentum.
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

UpdateRule rule_of(const SgdOptions& options) {
  check_usage(options.momentum >= 0 && options.weight_decay >= 0, "SGD with a negative momentum or weight decay");
  check_usage(!options.nesterov || options.momentum > 0, "Nesterov momentum without momentum", "set momentum above 0");
  const auto momentum = static_cast<float>(options.momentum), weight_decay = static_cast<float>(options.weight_decay);
  if (options.nesterov) return SgdNesterovRule{.momentum = momentum, .weight_decay = weight_decay};
  if (options.momentum > 0) return SgdMomentumRule{.momentum = momentum, .weight_decay = weight_decay};
  return SgdRule{.weight_decay = weight_decay};
}

class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<NamedParameter> parameters, const SgdOptions& options)
      : Optimizer(std::move(parameters), rule_of(options),
                  options.momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{}) {}

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t) const override {
    return {static_cast<float>(lr)};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options) {
  return std::make_unique<Sgd>(std::move(parameters), options);
}

const OptimizerFamily& sgd_family() {
  static const OptimizerFamily family = {
      .name = "sgd",
      .settings = {{.name = "momentum",
                    .fallback = 0.9,
                    .help = "momentum",
                    .role = SettingSpec::Role::kTraining,
                    .high = 1,
                    .placeholder = "X"},
                   {.name = "nesterov",
                    .fallback = false,
                    .help = "Nesterov's momentum",
                    .role = SettingSpec::Role::kTraining,
                    .need = {.what = "a momentum above 0",
                             .otherwise = "the momentum is 0",
                             .holds = [](const Settings& all) { return all.number("momentum") > 0; }}}},
      .make = [](std::vector<NamedParameter> parameters, const Settings& settings,
                 double weight_decay) -> std::unique_ptr<Optimizer> {
        return make_sgd(std::move(parameters), {.momentum = settings.number("momentum"),
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
