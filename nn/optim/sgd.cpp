// Stochastic gradient descent with momentum.
#include "nn/optim/optimizers.h"

namespace lockstep::nn {
namespace {

class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<NamedParameter> parameters, const SgdOptions& options)
      : Optimizer(std::move(parameters)),
        constants_{.momentum = static_cast<float>(options.momentum),
                   .weight_decay = static_cast<float>(options.weight_decay),
                   .nesterov = options.nesterov} {
    check_usage(options.momentum >= 0 && options.weight_decay >= 0, "SGD with a negative momentum or weight decay");
    check_usage(!options.nesterov || options.momentum > 0, "Nesterov momentum without momentum",
                "set momentum above 0");
    if (options.momentum > 0) momentum_ = zeros_like_parameters();
  }

  std::vector<NamedMoment> moments() const override {
    std::vector<NamedMoment> all;
    name_moments(momentum_, "momentum_buffer", all);
    return all;
  }

 private:
  std::array<float, StepControl::kRates> rates(double lr, std::int64_t) const override {
    return {static_cast<float>(lr), 0.0f, 0.0f};
  }
  void add_moments(std::size_t index, UpdateArrays& arrays) const override {
    if (!momentum_.empty()) arrays.first = momentum_[index].f32();
  }
  void run(OptimKernels& kernels, const Tensor& control, std::span<const UpdateArrays> all) override {
    kernels.sgd(constants_, control, all);
  }

  SgdConstants constants_;
  std::vector<Tensor> momentum_;
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
