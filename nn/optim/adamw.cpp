// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
#include <cmath>

#include "nn/optim/optimizers.h"

namespace lockstep::nn {
namespace {

class AdamW final : public Optimizer {
 public:
  AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
      : Optimizer(std::move(parameters)),
        constants_{.beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps},
        weight_decay_(options.weight_decay),
        m_(zeros_like_parameters()),
        v_(zeros_like_parameters()) {
    check_usage(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                "AdamW's betas must lie in [0, 1)");
    check_usage(options.eps >= 0 && options.weight_decay >= 0, "AdamW with a negative eps or weight decay");
  }

  std::vector<NamedMoment> moments() const override {
    std::vector<NamedMoment> all;
    name_moments(m_, "exp_avg", all);
    name_moments(v_, "exp_avg_sq", all);
    return all;
  }

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t step) const override {
    const auto t = static_cast<double>(step);
    return {static_cast<float>(lr / (1.0 - std::pow(constants_.beta1, t))),
            static_cast<float>(1.0 - lr * weight_decay_),
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(constants_.beta2, t)))};
  }
  void add_moments(std::size_t index, UpdateArrays& arrays) const override {
    arrays.first = m_[index].f32();
    arrays.second = v_[index].f32();
  }
  void run(OptimKernels& kernels, const Tensor& control, std::span<const UpdateArrays> all) override {
    kernels.adamw(constants_, control, all);
  }

  AdamWConstants constants_;
  double weight_decay_;
  std::vector<Tensor> m_, v_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options) {
  return std::make_unique<AdamW>(std::move(parameters), options);
}

const OptimizerFamily& adamw_family() {
  static const OptimizerFamily family = {
      .name = "adamw",
      .settings = {betas_setting()},
      .weight_decay = AdamWOptions().weight_decay,
      .make = [](std::vector<NamedParameter> parameters, const Settings& settings,
                 double weight_decay) -> std::unique_ptr<Optimizer> {
        const auto& betas = settings.numbers("betas");
        return make_adamw(std::move(parameters), {.beta1 = betas[0], .beta2 = betas[1], .weight_decay = weight_decay});
      }};
  return family;
}

}  // namespace lockstep::nn
