// SGD and AdamW, one parameter at a time.
#pragma once

#include <memory>
#include <vector>

#include "nn/layers/module.h"

namespace lockstep::nn {

struct SgdOptions {
  double momentum = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;
};

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.01;
};

/// Updates parameters from their gradients. A step is begin_step() and then update() once for every parameter that has
/// a gradient, in any order: so that one bucket's parameters can move while another's gradients still travel.
/// The parameters must outlive it.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// `lr`: this step's learning rate, at least 0 (else UsageError). `gradient_scale` multiplies every gradient first
  /// (clipping).
  void begin_step(double lr, double gradient_scale = 1.0);
  /// Moves parameter `index` (its place in the list the optimizer was made with) by its gradient.
  virtual void update(std::size_t index) = 0;

 protected:
  explicit Optimizer(std::vector<NamedParameter> parameters) : parameters_(std::move(parameters)) {}

  /// The one to update: asserts that a step has begun and that there is a gradient.
  Parameter& parameter(std::size_t index) const;

  std::vector<NamedParameter> parameters_;
  double lr_ = 0.0;
  double gradient_scale_ = 1.0;
  std::int64_t step_ = 0;  // counts from 1 once a step has begun
};

/// Throw UsageError for options that PyTorch refuses (negative rates, Nesterov without momentum…).
std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options);
std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options);

}  // namespace lockstep::nn
