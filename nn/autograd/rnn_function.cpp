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

RnnWeights weights_of(const Node::Parameters& parameters, DType dtype) {
  RnnWeights weights;
  Tensor* const places[] = {&weights.w_ih, &weights.w_hh, &weights.b_ih, &weights.b_hh};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] == nullptr) continue;
    *places[i] = parameters[i]->as(dtype);
    weights.versions[i] = parameters[i]->version();
  }
  return weights;
}

class RnnNode final : public Node {
 public:
  RnnNode(Var output, Var x, const Parameters& parameters, RnnOptions options, RnnState from, Tensor kept)
      : Node(output, parameters), x_(x), options_(std::move(options)), from_(std::move(from)), kept_(std::move(kept)) {}

  void backward(Tape& tape) override {
    const Tensor dy = tape.take_grad(output());
    RnnGradients gradients;
    Tensor* const places[] = {&gradients.w_ih, &gradients.w_hh, &gradients.b_ih, &gradients.b_hh};
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (parameters()[i] == nullptr || !parameters()[i]->requires_grad()) continue;
      const auto target = parameters()[i]->contribute();
      *places[i] = target.gradient;
      gradients.accumulate[i] = target.accumulate;
    }
    Tensor dx;
    if (x_.needs_grad()) dx = tape.backend().empty(x_.shape(), dy.dtype());
    tape.backend().rnn().backward(options_, as_sequence(x_.value()), weights_of(parameters(), dy.dtype()), from_,
                                  output().value(), kept_, dy, gradients, dx.defined() ? as_sequence(dx) : dx,
                                  [&] { tape.parameters_done(*this); });
    if (dx.defined()) tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  RnnOptions options_;
  RnnState from_;
  Tensor kept_;
};

// "an LSTM", "a GRU"
std::string text_of(RnnCell cell) { return fmt::format("{} {}", cell == RnnCell::kGru ? "a" : "an", name_of(cell)); }

void check_state(const RnnState& state, const RnnOptions& options, const Shape& shape, DType dtype) {
  for (const Tensor* const part : {&state.h, &state.c})
    if (part->defined() && (part->shape() != shape || part->dtype() != dtype))
      throw UsageError(
          fmt::format("{}'s state of {} {} for {} sequences of {} with {} features", text_of(options.cell),
                      name_of(part->dtype()), to_string(part->shape()), shape[0], name_of(dtype), shape[1]),
          "continue with the batch and the precision of that state, or begin with zeros");
  if (state.c.defined() && options.cell != RnnCell::kLstm)
    throw UsageError(fmt::format("{} was given a state with c, which LSTMs alone have", text_of(options.cell)),
                     "continue with a state of this layer, or begin with zeros");
}

void check_lengths(const Tape& tape, const RnnOptions& options, const Shape& x, bool hands_out_state) {
  if (!options.lengths.defined()) return;
  check_tensor(tape, options.lengths, DType::kI32, "a recurrent layer was given lengths");
  if (options.lengths.shape() != Shape{x[0]})
    throw UsageError(fmt::format("{} over {} with lengths {}", text_of(options.cell), to_string(x),
                                 to_string(options.lengths.shape())),
                     "give each sequence one length");
  if (hands_out_state && options.cell == RnnCell::kLstm && !tape.backend().rnn().hands_out_cells_of_lengths())
    throw UsageError("the last state of an LSTM over sequences of different lengths, which this device does not know",
                     "leave the states away; the last h are in the output, each at its sequence's last step");
}

}  // namespace

Var rnn(Tape& tape, Var x, const RnnParameters& parameters, RnnOptions options, RnnState* state) {
  const char* const name = name_of(options.cell);
  check_operand(tape, x, name);
  check_parameter(tape, parameters.w_ih, name);
  const Tape::OpScope scope(tape, "rnn", &parameters.w_ih);
  const std::int64_t inputs = parameters.w_ih.value().size(1), width = parameters.w_hh.value().size(1);
  const std::int64_t gates = gates_of(options.cell) * width;
  if (parameters.w_ih.value().size(0) != gates || parameters.w_hh.value().size(0) != gates ||
      (parameters.b_ih == nullptr) != (parameters.b_hh == nullptr))
    throw UsageError(
        fmt::format("{} with weights {} and {}", text_of(options.cell), to_string(parameters.w_ih.value().shape()),
                    to_string(parameters.w_hh.value().shape())),
        fmt::format("give ({0} · H, I) and ({0} · H, H), and both biases or none", gates_of(options.cell)));
  for (const Parameter* const bias : {parameters.b_ih, parameters.b_hh})
    check_further(tape, bias, {gates}, "a bias", name);
  check_parameter(tape, parameters.w_hh, name);
  check_usage(state == nullptr || !tape.recomputing(), "a recurrent layer with a state in a recomputed segment",
              "leave set_recomputed() or the state out: a second forward would begin where the first has ended");
  const bool fits =
      x.shape().size() >= 3 && x.shape()[1] >= 1 && (x.value().dtype() == DType::kF32 || is_half(x.value().dtype()));
  if (!fits || as_sequence(x.value()).size(2) != inputs)
    throw UsageError(fmt::format("{} with weights {} and {} was given {} of {}", text_of(options.cell),
                                 to_string(parameters.w_ih.value().shape()), to_string(parameters.w_hh.value().shape()),
                                 to_string(x.shape()), name_of(x.value().dtype())),
                     fmt::format("it takes (N, T, {}) with at least one step", inputs));
  const Tensor sequence = as_sequence(x.value());
  const DType dtype = sequence.dtype();
  const std::int64_t batch = sequence.size(0);
  check_lengths(tape, options, sequence.shape(), state != nullptr);
  if (state != nullptr) check_state(*state, options, {batch, width}, dtype);
  Backend& backend = tape.backend();
  const Node::Parameters all = {&parameters.w_ih, &parameters.w_hh, parameters.b_ih, parameters.b_hh};
  bool needs_grad = x.needs_grad();
  for (const Parameter* const parameter : all)
    needs_grad = needs_grad || (parameter != nullptr && parameter->requires_grad());
  RnnState from, to;
  if (state != nullptr) {
    from = *state;
    to.h = backend.empty({batch, width}, dtype);
    if (options.cell == RnnCell::kLstm) to.c = backend.empty({batch, width}, dtype);
  }
  Tensor y = backend.empty({batch, sequence.size(1), width}, dtype);
  Tensor kept =
      backend.rnn().forward(options, sequence, weights_of(all, dtype), from, y, to, needs_grad && tape.recording());
  if (state != nullptr) *state = std::move(to);
  const Var out = tape.make_var(std::move(y), needs_grad);
  tape.record<RnnNode>(out, x, all, std::move(options), std::move(from), std::move(kept));
  return out;
}

}  // namespace lockstep::nn
