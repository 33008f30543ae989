#include "nn/optim/optimizer.h"

#include <cmath>

namespace lockstep::nn {
namespace {

std::vector<Tensor> zeros_like(const std::vector<NamedParameter>& parameters) {
  std::vector<Tensor> made;
  made.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters)
    made.push_back(parameter->backend().zeros(parameter->value().shape()));
  return made;
}

class Sgd final : public Optimizer {
 public:
  Sgd(std::vector<NamedParameter> parameters, const SgdOptions& options)
      : Optimizer(std::move(parameters)), options_(options) {
    check_usage(options.momentum >= 0 && options.weight_decay >= 0, "SGD with a negative momentum or weight decay");
    check_usage(!options.nesterov || options.momentum > 0, "Nesterov momentum without momentum",
                "set momentum above 0");
    if (options.momentum > 0) momentum_ = zeros_like(parameters_);
  }

  void update(std::size_t index) override {
    Parameter& p = parameter(index);
    const SgdStep step{.lr = static_cast<float>(lr_),
                       .momentum = static_cast<float>(options_.momentum),
                       .weight_decay = static_cast<float>(options_.weight_decay),
                       .nesterov = options_.nesterov,
                       .gradient_scale = static_cast<float>(gradient_scale_)};
    p.backend().optim().sgd(step, p.gradient(), momentum_.empty() ? Tensor() : momentum_[index], p.value());
    p.changed();
  }

 private:
  SgdOptions options_;
  std::vector<Tensor> momentum_;
};

class AdamW final : public Optimizer {
 public:
  AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
      : Optimizer(std::move(parameters)), options_(options), m_(zeros_like(parameters_)), v_(zeros_like(parameters_)) {
    check_usage(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                "AdamW's betas must lie in [0, 1)");
    check_usage(options.eps >= 0 && options.weight_decay >= 0, "AdamW with a negative eps or weight decay");
  }

  void update(std::size_t index) override {
    Parameter& p = parameter(index);
    const auto t = static_cast<double>(step_);
    const AdamWStep step{.lr = lr_,
                         .beta1 = options_.beta1,
                         .beta2 = options_.beta2,
                         .eps = options_.eps,
                         .weight_decay = options_.weight_decay,
                         .bias_correction1 = 1.0 - std::pow(options_.beta1, t),
                         .bias_correction2 = 1.0 - std::pow(options_.beta2, t),
                         .gradient_scale = gradient_scale_};
    p.backend().optim().adamw(step, p.gradient(), m_[index], v_[index], p.value());
    p.changed();
  }

 private:
  AdamWOptions options_;
  std::vector<Tensor> m_, v_;
};

}  // namespace

void Optimizer::begin_step(double lr, double gradient_scale) {
  check_usage(lr >= 0, "an optimizer step with a negative learning rate");  // or one that is no number
  lr_ = lr;
  gradient_scale_ = gradient_scale;
  ++step_;
}

Parameter& Optimizer::parameter(std::size_t index) const {
  LOCKSTEP_ASSERT(index < parameters_.size(), "update of parameter {} of {}", index, parameters_.size());
  const auto& [name, parameter] = parameters_[index];
  LOCKSTEP_ASSERT(step_ > 0, "update of {} before begin_step", name);
  LOCKSTEP_ASSERT(parameter->gradient().defined(), "update of {}, which has no gradient", name);
  return *parameter;
}

std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options) {
  return std::make_unique<Sgd>(std::move(parameters), options);
}

std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options) {
  return std::make_unique<AdamW>(std::move(parameters), options);
}

}  // namespace lockstep::nn
