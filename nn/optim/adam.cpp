// Adam (Kingma and Ba, 2015). Its weight decay is a part of the gradient: PyTorch's Adam, where AdamW's is decoupled.
#include <cmath>

#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

class Adam final : public Optimizer {
 public:
  Adam(std::vector<NamedParameter> parameters, const AdamConstants& constants, double weight_decay)
      : Optimizer(std::move(parameters), AdamRule::of(constants.beta1, constants.beta2, constants.eps, weight_decay),
                  {"exp_avg", "exp_avg_sq"}),
        constants_(constants) {
    check_usage(weight_decay >= 0, "Adam with a negative weight decay");
  }

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t step) const override {
    const auto t = static_cast<double>(step);
    return {static_cast<float>(lr / (1.0 - std::pow(constants_.beta1, t))),
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(constants_.beta2, t)))};
  }

  AdamConstants constants_;
};

}  // namespace

const OptimizerFamily& adam_family() {
  static const OptimizerFamily family = {
      .name = "adam",
      .settings = adam_settings(),
      .make = [](std::vector<NamedParameter> parameters, const Settings& settings,
                 double weight_decay) -> std::unique_ptr<Optimizer> {
        return std::make_unique<Adam>(std::move(parameters), adam_constants(settings), weight_decay);
      },
  };
  return family;
}

}  // namespace lockstep::nn
