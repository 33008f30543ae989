// Adam (Kingma and Ba, 2015). Its weight decay is a part of the gradient: PyTorch's Adam, where AdamW's is decoupled.
#include <cmath>

#include "nn/ops/update_rules.h"
#include "nn/optim/optimizers.h"

namespace lockstep::nn {
namespace {

class Adam final : public Optimizer {
 public:
  Adam(std::vector<NamedParameter> parameters, double beta1, double beta2, double eps, double weight_decay)
      : Optimizer(std::move(parameters), AdamRule::of(beta1, beta2, eps, weight_decay), {"exp_avg", "exp_avg_sq"}),
        beta1_(beta1),
        beta2_(beta2) {
    check_usage(weight_decay >= 0, "Adam with a negative weight decay");
  }

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t step) const override {
    const auto t = static_cast<double>(step);
    return {static_cast<float>(lr / (1.0 - std::pow(beta1_, t))),
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2_, t)))};
  }

  double beta1_, beta2_;
};

}  // namespace

const OptimizerFamily& adam_family() {
  static const OptimizerFamily family = {.name = "adam",
                                         .settings = {betas_setting()},
                                         .make = [](std::vector<NamedParameter> parameters, const Settings& settings,
                                                    double weight_decay) -> std::unique_ptr<Optimizer> {
                                           const auto& betas = settings.numbers("betas");
                                           return std::make_unique<Adam>(std::move(parameters), betas[0], betas[1],
                                                                         1e-8, weight_decay);
                                         }};
  return family;
}

}  // namespace lockstep::nn
