// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
#include <cmath>

#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

UpdateRule rule_of(const AdamWOptions& options) {
  check_usage(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
              "AdamW's betas must lie in [0, 1)");
  check_usage(options.eps >= 0 && options.weight_decay >= 0, "AdamW with a negative eps or weight decay");
  return AdamWRule::of(options.beta1, options.beta2, options.eps);
}

class AdamW final : public Optimizer {
 public:
  AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
      : Optimizer(std::move(parameters), rule_of(options), {"exp_avg", "exp_avg_sq"}), options_(options) {}

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t step) const override {
    const auto t = static_cast<double>(step);
    return {static_cast<float>(lr / (1.0 - std::pow(options_.beta1, t))),
            static_cast<float>(1.0 - lr * options_.weight_decay),
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(options_.beta2, t)))};
  }

  AdamWOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options) {
  return std::make_unique<AdamW>(std::move(parameters), options);
}

const OptimizerFamily& adamw_family() {
  static const OptimizerFamily family = {
      .name = "adamw",
      .settings = adam_settings(),
      .weight_decay = AdamWOptions().weight_decay,
      .make = [](std::vector<NamedParameter> parameters, const Settings& settings,
                 double weight_decay) -> std::unique_ptr<Optimizer> {
        const auto [beta1, beta2, eps] = adam_constants(settings);
        return make_adamw(std::move(parameters),
                          {.beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay});
      }};
  return family;
}

}  // namespace lockstep::nn
