#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// (N, T, …) as (N, T, I)
Tensor as_sequence(const Tensor& x) {
  const std::int64_t steps = x.size(0) * x.size(1);
  std::int64_t inputs = 1;
  for (int axis = 2; axis < x.shape().size(); ++axis) inputs *= x.size(axis);
  LOCKSTEP_ASSERT(steps * inputs == x.count(), "{}", to_string(x.shape()));
  return x.reshaped({x.size(0), x.size(1), inputs});
}

LstmWeights weights_of(const Node::Parameters& parameters, DType dtype) {
  LstmWeights weights = {.w_ih = parameters[0]->as(dtype),
                         .w_hh = parameters[1]->as(dtype),
                         .b_ih = parameters[2]->as(dtype),
                         .b_hh = parameters[3]->as(dtype)};
  for (std::size_t i = 0; i < parameters.size(); ++i) weights.versions[i] = parameters[i]->version();
  return weights;
}

class LstmNode final : public Node {
 public:
  LstmNode(Var output, Var x, const Parameters& parameters, LstmState from, Tensor kept)
      : Node(output, parameters), x_(x), from_(std::move(from)), kept_(std::move(kept)) {}

  void backward(Tape& tape) override {
    const Tensor dy = tape.take_grad(output());
    LstmGradients gradients;
    Tensor* const places[] = {&gradients.w_ih, &gradients.w_hh, &gradients.b_ih, &gradients.b_hh};
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (!parameters()[i]->requires_grad()) continue;
      const auto target = parameters()[i]->contribute();
      *places[i] = target.gradient;
      gradients.accumulate[i] = target.accumulate;
    }
    Tensor dx;
    if (x_.needs_grad()) dx = tape.backend().empty(x_.shape(), dy.dtype());
    tape.backend().lstm().backward(as_sequence(x_.value()), weights_of(parameters(), dy.dtype()), from_,
                                   output().value(), kept_, dy, gradients, dx.defined() ? as_sequence(dx) : dx,
                                   [&] { tape.parameters_done(*this); });
    if (dx.defined()) tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  LstmState from_;
  Tensor kept_;
};

}  // namespace

Var lstm(Tape& tape, Var x, const LstmParameters& parameters, LstmState* state) {
  check_operand(tape, x, "LSTM");
  check_parameter(tape, parameters.w_ih, "LSTM");
  const Tape::OpScope scope(tape, "lstm", &parameters.w_ih);
  const std::int64_t inputs = parameters.w_ih.value().size(1), width = parameters.w_hh.value().size(1);
  const bool fits = x.shape().size() >= 3 && x.shape()[1] >= 1 &&
                    (x.value().dtype() == DType::kF32 || x.value().dtype() == DType::kBF16);
  if (!fits || as_sequence(x.value()).size(2) != inputs)
    throw UsageError(fmt::format("an LSTM over {} features was given {} of {}", inputs, to_string(x.shape()),
                                 name_of(x.value().dtype())),
                     "it takes (N, T, features) with at least one step");
  const Tensor sequence = as_sequence(x.value());
  const DType dtype = sequence.dtype();
  const std::int64_t batch = sequence.size(0);
  if (state != nullptr)
    for (const Tensor* const part : {&state->h, &state->c})
      if (part->defined() && (part->shape() != Shape{batch, width} || part->dtype() != dtype))
        throw UsageError(fmt::format("an LSTM's state of {} {} for {} sequences of {} with {} features",
                                     name_of(part->dtype()), to_string(part->shape()), batch, name_of(dtype), width),
                         "continue with the batch and the precision of that state, or begin anew");
  Backend& backend = tape.backend();
  const Node::Parameters all = {&parameters.w_ih, &parameters.w_hh, &parameters.b_ih, &parameters.b_hh};
  bool needs_grad = x.needs_grad();
  for (const Parameter* const parameter : all) needs_grad = needs_grad || parameter->requires_grad();
  LstmState from, to;
  if (state != nullptr) {
    from = *state;
    to = {.h = backend.empty({batch, width}, dtype), .c = backend.empty({batch, width}, dtype)};
  }
  Tensor y = backend.empty({batch, sequence.size(1), width}, dtype);
  Tensor kept = backend.lstm().forward(sequence, weights_of(all, dtype), from, y, to, needs_grad && tape.recording());
  if (state != nullptr) *state = std::move(to);
  const Var out = tape.make_var(std::move(y), needs_grad);
  tape.record<LstmNode>(out, x, all, std::move(from), std::move(kept));
  return out;
}

}  // namespace lockstep::nn
