// What all optimizers are: parameters move bucket by bucket. lockstep/nn/optim/optimizers.h has all by name.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/nn/layers/module.h"

namespace lockstep::nn {

/// What an optimizer remembers of a parameter, of the parameter's shape and in its layout.
struct NamedMoment {
  std::string name;  // the parameter's, a dot, and PyTorch's name for it: "fc1.weight.exp_avg"
  Parameter* parameter;
  Tensor value;
};

/// Parameters that are trained in another way than the rest.
struct ParameterGroup {
  std::vector<std::string> patterns;        // of their names; * stands for any characters: "*.bias"
  double lr_factor = 1;                     // of the step's learning rate
  std::optional<double> weight_decay = {};  // default: the optimizer's
};

/// How an optimizer moves parameters, with its constants: what a file of nn/optim/ makes.
struct UpdateMethod {
  double weight_decay = 0;
  /// Of parameters with this weight decay.
  std::function<UpdateRule(double weight_decay)> rule;
  /// What the rule calls its rates, for step `step` (from 1).
  std::function<std::array<float, StepControl::kRates>(double lr, std::int64_t step, double weight_decay)> rates;
  std::vector<std::string> moments = {};  // PyTorch's names of what it remembers ("exp_avg"), as many as the rule does
};

struct StepOptions {
  double lr = 0;         // at least 0
  double clip_norm = 0;  // largest L2 norm of all gradients together; 0: no clipping
};

/// Updates parameters from their gradients. A step is begin_step() and then update() once for every parameter that has
/// a gradient, in any order and any groups: so that one bucket's parameters can move while another's gradients still
/// travel. Between the two, compute_update_scale() may hold the step back or scale its gradients.
/// The parameters must outlive it: to use one that is gone is a UsageError.
class Optimizer final {
 public:
  /// A parameter belongs to the first of `groups` that names it. Throws UsageError for a parameter that is none or
  /// comes twice, for parameters on several devices, for a pattern that no name has, and for negative rates.
  Optimizer(std::vector<NamedParameter> parameters, UpdateMethod method,
            const std::vector<ParameterGroup>& groups = {});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// The parameters' gradients are forgotten: the next backward pass writes them anew.
  void zero_grad();
  /// begin_step() and update() of all parameters that have a gradient. The others stay as they are, moments included,
  /// and the step does not count for them: AdamW's corrections go by a parameter's own steps. Throws UsageError where
  /// none has one (backward has not run, or zero_grad() after it), and for a gradient that is this rank's part of a
  /// sum over ranks (Parameter::is_partial()).
  void step(double lr) { step(StepOptions{.lr = lr}); }
  /// The same with the gradients' norm clipped, as torch.nn.utils.clip_grad_norm_ does it. Where that norm is no finite
  /// number, nothing moves.
  void step(const StepOptions& options);

  /// `lr`: this step's learning rate, at least 0 (else UsageError).
  void begin_step(double lr);
  /// squares (1) f64 += Σ g² over the gradients of these parameters.
  void add_squares(std::span<const std::size_t> indices, const Tensor& squares);
  /// OptimKernels::compute_update_scale() for this step.
  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm);
  /// All that it remembers: the first of all parameters, then the second. With steps() it is what a run resumes from.
  std::vector<NamedMoment> moments() const;
  /// Steps that have begun.
  std::int64_t steps() const { return step_; }
  void set_steps(std::int64_t steps) { step_ = steps; }

  /// Moves these parameters (their places in the list the optimizer was made with) by their gradients.
  void update(std::span<const std::size_t> indices);

 private:
  /// Parameters that move alike.
  struct Group {
    double lr_factor, weight_decay;
    std::unique_ptr<const UpdateRule> rule;
    Tensor control;
  };
  void add_group(double lr_factor, double weight_decay);
  void write_control(double lr, std::int64_t step);
  std::span<const UpdateArrays> arrays_of(std::span<const std::size_t> indices);
  Parameter& parameter(std::size_t index) const;
  void check_there(std::size_t index) const;

  struct Moment {
    std::string name;            // PyTorch's
    std::vector<Tensor> values;  // by parameter
  };

  std::vector<NamedParameter> parameters_;
  UpdateMethod method_;
  std::vector<Group> groups_;          // the first: of all that no other names
  std::vector<std::size_t> group_of_;  // by parameter
  std::vector<Moment> moments_;
  Backend* backend_ = nullptr;              // nullptr: there are no parameters
  Tensor nothing_, squares_;                // of step(): a loss of 0, and the squares of gradients
  std::vector<Lifetime::Ref> lifetimes_;    // by parameter
  std::vector<UpdateArrays> arrays_;        // of one call
  std::vector<std::size_t> together_;       // of one group, in one call
  std::vector<std::size_t> with_gradient_;  // of one step()
  std::vector<std::int64_t> missed_;        // by parameter: calls of step() in which it had no gradient
  std::int64_t step_ = 0;                   // 0 before the first step
};

struct SgdOptions {
  double momentum = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;
};

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.01;
};

/// Throw UsageError for options that PyTorch refuses (negative rates, Nesterov without momentum…).
std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options,
                                    const std::vector<ParameterGroup>& groups = {});
std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options,
                                      const std::vector<ParameterGroup>& groups = {});

}  // namespace lockstep::nn
