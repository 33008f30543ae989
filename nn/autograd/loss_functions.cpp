#include <cmath>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// Forward has computed the gradient already: the two share their work.
class LossNode final : public Node {
 public:
  LossNode(Var output, Var x, Tensor dx) : Node(output), x_(x), dx_(std::move(dx)) {}
  void backward(Tape& tape) override { tape.contribute(x_, std::move(dx_)); }

 private:
  Var x_;
  Tensor dx_;
};

// Its rows lie as those of x do.
Tensor gradient_for(Tape& tape, Var x) {
  if (!tape.recording() || !x.needs_grad()) return {};
  return x.rows().is_contiguous() ? tape.backend().empty(x.shape(), x.dtype())
                                  : Tensor::empty(tape.backend().allocator(), x.shape(), x.dtype(), x.rows().pitch());
}

void check_scale(float scale) {
  if (!std::isfinite(scale))
    throw UsageError(
        fmt::format("a loss scaled by {}", scale),
        "scale it by 1 / samples of all ranks, of which there is at least one; a rank without samples calls "
        "DistributedDataParallel::contribute_nothing()");
}

Loss finish(Tape& tape, Var x, Tensor totals, Tensor dx) {
  const Var out = tape.make_loss(std::move(totals), x.needs_grad());
  tape.record<LossNode>(out, x, std::move(dx));
  return {out};
}

}  // namespace

Loss cross_entropy(Tape& tape, Var outputs, const Tensor& targets, float scale, const TargetRule& rule) {
  return cross_entropy(tape, outputs, targets, scale, rule, Outputs::kKept);
}

Loss cross_entropy(Tape& tape, Var outputs, const Tensor& targets, float scale, const TargetRule& rule, Outputs use) {
  check_operand(tape, outputs, "cross entropy");
  const Shape& shape = outputs.shape();
  const bool soft = targets.dtype() == DType::kF32 && targets.shape() == shape;  // one of labels has fewer axes
  check_tensor(tape, targets, soft ? DType::kF32 : DType::kI32, "cross entropy was given labels");
  check_scale(scale);
  if (!(rule.smoothing >= 0 && rule.smoothing < 1))
    throw UsageError(fmt::format("cross entropy with labels smoothed by {}", rule.smoothing),
                     "give a number from 0 to below 1");
  check_usage(!soft || !rule.ignored, "cross entropy of probabilities with a label that is ignored",
              "give labels, or leave TargetRule::ignored out");
  if (rule.weights.defined()) check_tensor(tape, rule.weights, DType::kF32, "cross entropy was given weights");
  const Tape::OpScope scope(tape, "cross_entropy");
  const int axes = shape.size() - 1;
  if (axes < 1 || (!soft && targets.shape() != Shape(shape.dims().first(static_cast<std::size_t>(axes)))))
    throw UsageError(
        fmt::format("cross entropy of logits {} with labels {}", to_string(shape), to_string(targets.shape())),
        "logits have the labels' axes, and one of the classes after them");
  check_usage(shape[axes] > 0, "cross entropy over no classes", "give the model's last layer an output for each class");
  if (rule.weights.defined() && rule.weights.shape() != Shape{shape[axes]})
    throw UsageError(
        fmt::format("cross entropy of logits {} with weights {}", to_string(shape), to_string(rule.weights.shape())),
        "give one for each class");
  Tensor totals = tape.backend().empty({2});
  const Shape rows = {shape.count() / shape[axes], shape[axes]};
  Tensor dlogits = use == Outputs::kTaken && tape.recording() ? tape.take_value(outputs) : Tensor();
  const Tensor logits = dlogits.defined() ? dlogits : outputs.rows();
  if (!dlogits.defined()) dlogits = gradient_for(tape, outputs);
  const LossScale by(scale, tape.loss_scale());
  const Tensor gradient = dlogits.defined() ? dlogits.reshaped(rows) : dlogits;
  LossKernels& kernels = tape.backend().loss();
  if (soft)
    kernels.soft_cross_entropy(logits.reshaped(rows), targets.reshaped(rows), by, rule, totals, gradient);
  else
    kernels.cross_entropy(logits.reshaped(rows), targets.reshaped({rows[0]}), by, rule, totals, gradient);
  return finish(tape, outputs, std::move(totals), dlogits.with_zeros_between_rows());
}

Loss squared_error(Tape& tape, Var x, const Tensor& target, float scale) {
  check_operand(tape, x, "squared error");
  check_tensor(tape, target, x.value().dtype(), "squared error was given a target");
  check_scale(scale);
  const Tape::OpScope scope(tape, "squared_error");
  if (x.shape() != target.shape())
    throw UsageError(fmt::format("squared error of {} against {}", to_string(x.shape()), to_string(target.shape())),
                     "both have one shape");
  Tensor totals = tape.backend().empty({2});
  Tensor dx = gradient_for(tape, x);
  tape.backend().loss().squared_error(x.value(), target, LossScale(scale, tape.loss_scale()), totals, dx);
  return finish(tape, x, std::move(totals), std::move(dx));
}

}  // namespace lockstep::nn
