// What all optimizers are: parameters move bucket by bucket. lockstep/nn/optim/optimizers.h has all by name.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/nn/layers/module.h"

namespace lockstep::nn {

/// Some of a parameter's elements, in its own layout: whole blocks of it (Note [Norm blocks]), of which the last may be
/// cut by the parameter's end.
struct ParameterSlice {
  std::int64_t begin = 0, count = 0;
};

/// What joins optimizers of slices, one on each rank, which call it in the same order: of an optimizer's share. Called
/// on the optimizer's thread. Spans are there during the call, their tensors until the optimizer ends. What it throws
/// comes out of the optimizer, in the middle of a step.
class SliceExchange {
 public:
  virtual ~SliceExchange() = default;
  /// Each of `parts`, f64, becomes the sum of all optimizers', of whom one has a number and the others 0.
  void sum(std::span<const Tensor> parts) {
    begin_sum(parts);
    end_sum(parts);
  }
  /// The same in two: what is between them does not wait for it. One at a time, of the same parts, whose content nobody
  /// touches in between.
  virtual void begin_sum(std::span<const Tensor> parts) = 0;
  virtual void end_sum(std::span<const Tensor> parts) = 0;
  /// The slices of these parameters are about to be written: not while somebody reads them.
  virtual void before_update(std::span<const std::size_t> indices) = 0;
  /// Between the two: how many elements lie from each parameter to the same one of every other optimizer, which gets
  /// the new values of a slice at once (OptimKernels::update). Nothing: after_update() and finish() see to them. Valid
  /// until the next call.
  virtual std::span<const std::ptrdiff_t> replicas() const { return {}; }
  /// They have been: all optimizers' parameters get to be the same again, after finish().
  virtual void after_update(std::span<const std::size_t> indices) = 0;
  virtual void finish() = 0;
};

/// What an optimizer has of a step that several share (Note [Slices]).
struct OptimizerShare {
  std::vector<ParameterSlice> slices = {};            // by parameter; empty: all of each
  std::shared_ptr<SliceExchange> exchange = nullptr;  // nullptr: nobody else has the rest
};

/// For code that moves parameters: throws a UsageError that begins with `what` if one of them is nullptr, is repeated,
/// or is on another backend than the first.
void check_parameters(const std::vector<NamedParameter>& parameters, const char* what);

/// What an optimizer remembers of a parameter: of the parameter's shape and in its layout, or, of an optimizer of
/// slices, of one dimension. The tensor shares the optimizer's memory; the parameter is the module's.
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

/// How an optimizer moves parameters, with its constants: what a file of nn/optim/ makes. The optimizer keeps it, and
/// calls `rule` when it is made and `rates` in each step, on its thread.
struct UpdateMethod {
  double weight_decay = 0;
  /// Where a step may give another one (StepOptions). Nothing: no step may.
  std::optional<double> momentum = {};
  /// Of parameters with this weight decay.
  std::function<UpdateRule(double weight_decay)> rule;
  /// The rates of the rule, and their corrections by the number of the step: a device that counts the steps itself
  /// divides by them (GradScaler).
  std::function<std::array<double, StepControl::kRates>(double lr, double weight_decay, double momentum)> rates;
  RateCorrections corrections = {};
  std::vector<std::string> moments = {};  // PyTorch's names of what it remembers ("exp_avg"), as many as the rule does
  /// Not nullptr: the rule is for matrices, whose second moment is made orthogonal before the rule is applied (Note
  /// [Matrices]), and this is for all other parameters. It has as many moments, which have the other names.
  std::shared_ptr<const UpdateMethod> otherwise = nullptr;
};

struct StepOptions {
  double lr = 0;                        // at least 0
  double clip_norm = 0;                 // largest L2 norm of all gradients together; 0: no clipping
  std::optional<double> momentum = {};  // SGD's, or Adam's first beta, in [0, 1); default: the optimizer's own
};

class GradScaler;
class Orthogonalizer;  // nn/optim/orthogonal.h

/// Updates parameters from their gradients. A step is begin_step() and then update() once for every parameter that has
/// a gradient, in any order and any groups: so that one bucket's parameters can move while another's gradients still
/// travel. Between the two, compute_update_scale() may hold the step back or scale its gradients. The parameters and
/// their backend must outlive it: to use a parameter that is gone is a UsageError. One thread uses it. What it returns
/// by reference is its own. Where a step throws that has begun, some of the parameters may have moved, and it counts.
///
/// Note [Slices]
/// An optimizer of slices moves those elements of each parameter alone, and remembers nothing of the others: one rank's
/// share of a step (ZeRO). What depends on whole parameters are sums over blocks (Note [Norm blocks]), which the ranks
/// add up through an exchange: sum_squares() and update() are collective then. Without an exchange it is the caller who
/// adds them up: square_sums() before sum_squares(), norm_sums() between prepare() and update(). Slices leave no other
/// trace: an element has the same bits as without.
class Optimizer final {
 public:
  /// A parameter belongs to the first of `groups` that names it. Throws UsageError for a null or repeated parameter,
  /// for parameters on several devices, for a pattern without a matching name, for invalid slices, and for negative
  /// rates.
  Optimizer(std::vector<NamedParameter> parameters, UpdateMethod method, const std::vector<ParameterGroup>& groups = {},
            OptimizerShare share = {});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Clears the parameters' gradients: the next backward pass overwrites them.
  void zero_grad();
  /// begin_step() and update() of all parameters that have a gradient. The others stay as they are, moments included,
  /// and the step does not count for them: AdamW's corrections go by a parameter's own steps. Throws UsageError where
  /// none has one (backward has not run, or zero_grad() after it), and for a gradient that is this rank's part of a
  /// sum over ranks (Parameter::is_partial()).
  void step(double lr) { step(StepOptions{.lr = lr}); }
  /// The same with the gradients' norm clipped, as torch.nn.utils.clip_grad_norm_ does it. Where that norm is no finite
  /// number, nothing moves.
  void step(const StepOptions& options);

  /// This step's learning rate, at least 0, and momentum (StepOptions); UsageError for others, and for the momentum of
  /// an optimizer without one, or whose momentum is a constant.
  void begin_step(double lr, std::optional<double> momentum = {});
  bool takes_momentum() const { return method_.momentum.has_value(); }
  /// The gradients of these parameters are a part of the norm that sum_squares() finds. After begin_step().
  void add_squares(std::span<const std::size_t> indices);
  /// squares (1) f64 = Σ g² over all gradients that add_squares() was given in this step, in an order that does not
  /// depend on the calls. Once in a step.
  void sum_squares(const Tensor& squares);
  /// Before that, for other work between the two, but none of this optimizer's: of slices, the other optimizers' share
  /// begins to come.
  void begin_sum_squares();
  /// OptimKernels::compute_update_scale() for this step. With a GradScaler it comes once before update() of anything,
  /// after sum_squares() of all gradients: else UsageError.
  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm);
  /// All that it remembers: the first of all parameters, then the second. With steps() it is what a run resumes from.
  std::vector<NamedMoment> moments() const;
  /// Steps that have begun; with a GradScaler only those that were not skipped, and the call waits for the device.
  std::int64_t steps() const;
  void set_steps(std::int64_t steps);

  /// From the next step on gradients are those of losses that `scaler` has scaled (Tape::set_loss_scale()): each step
  /// divides them by its scale, and changes nothing, its own count included, where one of them is not finite. Clipping
  /// is by the norm that they have then. The caller says when the scale may move: GradScaler::update(). nullptr: none,
  /// the beginning. It must outlive the optimizer's steps or the next call, else they are UsageErrors, as is one of
  /// another backend. Between steps; waits for the device where there was one.
  void set_scaler(GradScaler* scaler);
  GradScaler* scaler() const { return scaler_; }
  /// (StepControl::kSize): kApply says whether the step under way moves anything, once that is decided. Undefined where
  /// there are no parameters.
  const Tensor& control() const { return groups_.front().control; }

  /// Moves these parameters (their places in the list the optimizer was made with) by their gradients. Whatever
  /// prepare() has not been called for in this step is prepared before. With an exchange, parameters are complete after
  /// SliceExchange::finish(), which step() calls. Throws UsageError for places that there are not, before begin_step(),
  /// and for gradients as step() does.
  void update(std::span<const std::size_t> indices);

  // For whoever joins optimizers of slices.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const std::vector<ParameterSlice>& slices() const { return share_.slices; }
  /// Whether it has slices, and not all of each parameter.
  bool is_sliced() const { return sliced_; }
  /// Whether updates depend on norms of whole parameters (LAMB, LARS), which prepare() takes.
  bool needs_norms() const { return needs_norms_; }
  void prepare(std::span<const std::size_t> indices);
  /// (blocks) f64: Σ g² of each block that add_squares() was given, zeros elsewhere.
  const Tensor& square_sums() const { return square_sums_; }
  /// (2 · blocks) f64: the same of the two norms that prepare() takes. Undefined unless needs_norms().
  const Tensor& norm_sums() const { return norm_sums_; }

 private:
  /// Parameters that move alike.
  struct Group {
    const UpdateMethod* method;
    double lr_factor, weight_decay;
    std::unique_ptr<const UpdateRule> rule;
    Tensor control;
    Tensor rates;  // with a GradScaler: (kRates) f64, before corrections
  };
  void add_group(const UpdateMethod& method, double lr_factor, double weight_decay);
  std::size_t add_groups(double lr_factor, double weight_decay);
  void orthogonalize(const Group& group, std::span<const std::size_t> indices);
  std::array<double, StepControl::kRates> rates_of(const Group& group) const;
  void write_control(std::int64_t step);
  void write_rates();
  void compute_control(const Tensor& loss, const Tensor& squares, double clip_norm, std::int64_t missed);
  void count_step();
  void count_missed();
  std::span<const std::size_t> of_group(std::size_t group, std::span<const std::size_t> indices);
  std::span<const UpdateArrays> arrays_of(std::span<const std::size_t> indices, double* sums, std::int64_t per_block);
  std::span<const UpdateArrays> whole_sums_of(std::span<const std::size_t> indices);
  void prepare_rest(std::span<const std::size_t> indices);
  void zero_once(const Tensor& sums, std::int64_t& zeroed_in) const;
  void check_slices() const;
  Parameter& parameter(std::size_t index) const;
  void check_there(std::size_t index) const;
  void check_gradient(std::size_t index) const;

  struct Moment {
    std::string name;            // PyTorch's
    std::vector<Tensor> values;  // by parameter
  };

  std::vector<NamedParameter> parameters_;
  UpdateMethod method_;
  std::vector<Group> groups_;          // the first: of all that no other names
  std::vector<std::size_t> group_of_;  // by parameter
  std::vector<Moment> moments_;
  Backend* backend_ = nullptr;  // nullptr: there are no parameters
  Tensor nothing_, squares_;    // of step(): a loss of 0, and the squares of gradients
  bool sliced_ = false;
  OptimizerShare share_;  // slices of all parameters, also where they are whole
  bool needs_norms_ = false;
  std::vector<std::int64_t> first_block_;  // by parameter, among all blocks
  Tensor square_sums_, norm_sums_, factors_;
  std::int64_t squares_zeroed_in_ = 0, norms_zeroed_in_ = 0;  // steps
  bool summing_squares_ = false;
  std::vector<std::int64_t> prepared_in_;           // by parameter: the last step
  std::vector<std::size_t> unprepared_;             // of one call
  std::vector<Tensor> parts_;                       // of one exchange
  std::vector<Lifetime::Ref> lifetimes_;            // by parameter
  std::vector<UpdateArrays> arrays_;                // of one call
  std::vector<std::size_t> together_;               // of one group, in one call
  std::vector<std::size_t> with_gradient_;          // of one step()
  std::vector<std::int64_t> missed_;                // by parameter: calls of step() in which it had no gradient
  std::int64_t step_ = 0;                           // 0 before the first step
  double lr_ = 0;                                   // of the step
  std::optional<double> momentum_ = {};             // of the step; default: the method's
  std::unique_ptr<Orthogonalizer> orthogonalizer_;  // nullptr: there are no matrices
  Lifetime::Ref scaler_lifetime_;
  GradScaler* scaler_ = nullptr;
  Tensor applied_;               // (1) i64, with a GradScaler: steps that were not skipped
  std::int64_t decided_in_ = 0;  // the last step of compute_update_scale()
};

/// torch.optim.SGD's, with dampening = 0.
struct SgdOptions {
  double momentum = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;
};

/// torch.optim.AdamW's (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).
struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.01;
};

/// Throw UsageError for options that PyTorch refuses (negative rates, Nesterov without momentum…).
std::unique_ptr<Optimizer> make_sgd(std::vector<NamedParameter> parameters, const SgdOptions& options,
                                    const std::vector<ParameterGroup>& groups = {}, OptimizerShare share = {});
std::unique_ptr<Optimizer> make_adamw(std::vector<NamedParameter> parameters, const AdamWOptions& options,
                                      const std::vector<ParameterGroup>& groups = {}, OptimizerShare share = {});

}  // namespace lockstep::nn
