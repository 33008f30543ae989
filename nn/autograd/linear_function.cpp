#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// (…, features) as (N, features)
Tensor as_rows(const Tensor& x) {
  const std::int64_t features = x.size(x.shape().size() - 1);
  std::int64_t rows = 1;
  for (int axis = 0; axis + 1 < x.shape().size(); ++axis) rows *= x.size(axis);
  return x.reshaped({rows, features});
}

class LinearNode final : public Node {
 public:
  LinearNode(Var output, Var x, Parameter& w, Parameter* b, Epilogue epilogue)
      : Node(output, {&w, b}), x_(x), epilogue_(epilogue) {}

  bool reads_output() const override { return epilogue_ != Epilogue::kNone; }

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& w = *parameters()[0];
    Parameter* const b = parameters()[1];
    const Tensor dy =
        as_rows(epilogue_ == Epilogue::kNone ? tape.take_grad(output()) : tape.take_grad_through(output(), epilogue_));
    const Tensor x = as_rows(x_.value());
    // Weights first: their collective can start while the input's gradient is computed.
    const bool bias_wants = b != nullptr && b->requires_grad();
    if (bias_wants && w.requires_grad()) {
      const auto of_bias = b->contribute(), of_weight = w.contribute();
      backend.linear().backward_weight_and_bias(x, dy, of_weight.accumulate, of_weight.gradient, of_bias.accumulate,
                                                of_bias.gradient);
    } else if (bias_wants) {
      const auto target = b->contribute();
      backend.linear().backward_bias(dy, target.accumulate, target.gradient);
    } else if (w.requires_grad()) {
      const auto target = w.contribute();
      backend.linear().backward_weight(x, dy, target.accumulate, target.gradient);
    }
    if (x_.needs_grad()) {
      tape.parameters_done(*this);
      Tensor dx = backend.empty(x_.shape(), dy.dtype());
      if (x_.saved_preactivation().defined()) {
        backend.linear().backward_input_through(dy, w.as(dy.dtype()), x_.activation(), x_.saved_preactivation(),
                                                as_rows(dx));
        tape.contribute_through(x_, std::move(dx));
      } else {
        backend.linear().backward_input(dy, w.as(dy.dtype()), as_rows(dx));
        tape.contribute(x_, std::move(dx));
      }
    }
  }

 private:
  Var x_;
  Epilogue epilogue_;
};

enum class Rows : std::uint8_t { kContiguous, kApart };

Var compute(Tape& tape, Var x, Parameter& w, Parameter* b, Epilogue epilogue, Rows lie) {
  check_operand(tape, x, "Linear");
  check_parameter(tape, w, "Linear");
  check_further(tape, b, {w.value().size(0)}, "a bias", "Linear");
  const int last = x.shape().size() - 1;
  if (last < 1 || x.shape()[last] != w.value().size(1))
    throw UsageError(
        fmt::format("Linear with a weight of {} was given {}", to_string(w.value().shape()), to_string(x.shape())),
        fmt::format("the last axis has in_features, {}: flatten the input, or match the layer to it",
                    w.value().size(1)));
  LinearKernels& kernels = tape.backend().linear();
  const DType dtype = x.value().dtype();
  const bool needs_grad = x.needs_grad() || w.requires_grad() || (b != nullptr && b->requires_grad());
  Shape shape = x.shape();
  shape[last] = w.value().size(0);
  const Tensor rows = as_rows(x.value());
  SavedPreactivation kept;
  if (epilogue != Epilogue::kNone && needs_grad && tape.recording()) {
    kept = kernels.saved_preactivation_of(epilogue, rows.size(0), shape[last], dtype);
    // GELU's input cannot be computed from its result.
    if (epilogue == Epilogue::kGelu && kept.shape.count() == 0)
      return gelu(tape, linear(tape, x, w, b), GeluKind::kTanh);
  }
  const Tape::OpScope scope(tape, "linear", &w);
  const std::int64_t pitch = lie == Rows::kApart ? tape.backend().pitch_of(shape[last], dtype) : shape[last];
  Tensor y = Tensor::empty(tape.backend().allocator(), shape, dtype, pitch), saved_preactivation;
  const Tensor results = as_rows(y), bias = b != nullptr ? b->as(dtype) : Tensor();
  const Int8Rows* const int8 = tape.recording() ? nullptr : w.int8_rows();
  if (int8 != nullptr && dtype == DType::kF32) {
    kernels.forward_int8_rows(rows, *int8, bias, epilogue, results);
  } else if (kept.shape.count() > 0) {
    saved_preactivation = tape.backend().empty(kept.shape, kept.dtype);
    kernels.forward_saved_preactivation(rows, w.as(dtype), bias, epilogue, results, saved_preactivation);
  } else {
    kernels.forward(rows, w.as(dtype), bias, epilogue, results);
  }
  const Var out = tape.make_var(std::move(y), needs_grad);
  if (saved_preactivation.defined())
    tape.save_preactivation(
        out, epilogue,
        epilogue == Epilogue::kGelu ? saved_preactivation.reshaped(shape) : std::move(saved_preactivation));
  tape.record<LinearNode>(out, x, w, b, epilogue);
  return out;
}

}  // namespace

Var linear(Tape& tape, Var x, Parameter& w, Parameter* b, Epilogue epilogue) {
  return compute(tape, x, w, b, epilogue, Rows::kContiguous);
}

Var logits(Tape& tape, Var x, Parameter& w, Parameter* b) {
  return compute(tape, x, w, b, Epilogue::kNone, Rows::kApart);
}

}  // namespace lockstep::nn
