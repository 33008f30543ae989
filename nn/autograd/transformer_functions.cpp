#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

class LayerNormNode final : public Node {
 public:
  LayerNormNode(Var output, Var x, Parameter& gamma, Parameter* beta, Tensor mean, Tensor inverse)
      : Node(output, {&gamma, beta}), x_(x), mean_(std::move(mean)), inverse_(std::move(inverse)) {}

  void backward(Tape& tape) override {
    LayerNormKernels& kernels = tape.backend().layer_norm();
    Parameter& gamma = *parameters()[0];
    Parameter* const beta = parameters()[1];
    const Tensor dy = tape.take_grad(output());
    const bool gamma_wants = gamma.requires_grad(), beta_wants = beta != nullptr && beta->requires_grad();
    const bool add_gamma = gamma_wants && gamma.contribute().accumulate;
    const bool add_beta = beta_wants && beta->contribute().accumulate;
    Tensor dgamma = gamma_wants ? gamma.gradient() : Tensor(), dbeta = beta_wants ? beta->gradient() : Tensor();
    const bool at_once =
        (gamma_wants || beta_wants) && x_.needs_grad() && kernels.backward_reads_once(gamma.value().count());
    if (!at_once) {
      // Parameters first: their collective can start while the input's gradient is computed.
      if (gamma_wants || beta_wants)
        kernels.backward_parameters(x_.value(), dy, mean_, inverse_, add_gamma, dgamma, add_beta, dbeta);
      if (!x_.needs_grad()) return;
      tape.parameters_done(*this);
      dgamma = dbeta = Tensor();
    }
    // What goes past a block has its gradient before what goes through it.
    const Tensor sum = kernels.adds_to_gradients() ? tape.grad_in_place(x_) : Tensor();
    const bool add = sum.defined();
    Tensor dx = sum;
    if (!add) dx = dy.is_sole_owner() ? dy : tape.backend().empty(x_.shape(), dy.dtype());
    kernels.backward(x_.value(), dy, gamma.value(), mean_, inverse_, add, dx, add_gamma, dgamma, add_beta, dbeta);
    if (!add) tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Tensor mean_, inverse_;
};

class EmbeddingNode final : public Node {
 public:
  EmbeddingNode(Var output, Tensor tokens, Parameter& table) : Node(output, {&table}), tokens_(std::move(tokens)) {}

  void backward(Tape& tape) override {
    Parameter& table = *parameters()[0];
    const auto target = table.contribute();
    tape.backend().embedding().backward(tokens_, tape.grad(output()), target.accumulate, target.gradient);
  }

 private:
  Tensor tokens_;
};

class AddPositionsNode final : public Node {
 public:
  AddPositionsNode(Var output, Var x, Parameter& table, std::int64_t first)
      : Node(output, {&table}), x_(x), first_(first) {}

  void backward(Tape& tape) override {
    Parameter& table = *parameters()[0];
    Tensor dy = tape.take_grad(output());
    if (table.requires_grad()) {
      const auto target = table.contribute();
      tape.backend().embedding().add_rows_backward(dy, first_, target.accumulate, target.gradient);
    }
    tape.contribute(x_, std::move(dy));
  }

 private:
  Var x_;
  std::int64_t first_;
};

// Of queries, keys and values that are one value, side by side, or three.
class AttentionNode final : public Node {
 public:
  AttentionNode(Var output, const std::array<Var, 3>& x, bool together, std::int64_t heads, AttentionOptions options,
                Tensor log_sums)
      : Node(output),
        x_(x),
        together_(together),
        heads_(heads),
        options_(std::move(options)),
        log_sums_(std::move(log_sums)) {}

  static AttentionInputs inputs_of(const std::array<Var, 3>& x, bool together) {
    if (together) return x[0].value();
    return {x[0].value(), x[1].value(), x[2].value()};
  }

  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    const auto like = [&](Var x) { return tape.backend().empty(x.shape(), dy.dtype()); };
    const auto differentiate = [&](const AttentionInputs& dx) {
      tape.backend().attention().backward(inputs_of(x_, together_), heads_, options_, output().value(), log_sums_, dy,
                                          dx);
    };
    if (together_) {
      Tensor dqkv = like(x_[0]);
      differentiate(dqkv);
      tape.contribute(x_[0], std::move(dqkv));
      return;
    }
    AttentionInputs dx(like(x_[0]), like(x_[1]), like(x_[2]));
    differentiate(dx);
    Tensor* const gradients[] = {&dx.q, &dx.k, &dx.v};
    for (std::size_t i = 0; i < x_.size(); ++i)
      if (x_[i].needs_grad()) tape.contribute(x_[i], std::move(*gradients[i]));
  }

 private:
  std::array<Var, 3> x_;
  bool together_;
  std::int64_t heads_;
  AttentionOptions options_;
  Tensor log_sums_;
};

}  // namespace

namespace {

// Of a result y of x's shape, and of the statistics of its rows.
struct NormResult {
  NormResult(Tape& tape, Var x, const Parameter& gamma, const Parameter* beta) {
    check_parameter(tape, gamma, "LayerNorm");
    check_further(tape, beta, gamma.value().shape(), "a bias", "LayerNorm");
    const std::int64_t width = gamma.value().count();
    const int last = x.shape().size() - 1;
    if (width < 1 || last < 0 || x.shape()[last] != width)
      throw UsageError(fmt::format("LayerNorm over {} features was given {}", width, to_string(x.shape())),
                       "match normalized_shape to the last axis of the input");
    Backend& backend = tape.backend();
    const std::int64_t rows = x.value().count() / width;
    y = backend.empty(x.shape(), x.value().dtype());
    mean = backend.empty({rows});
    inverse = backend.empty({rows});
  }

  Var record(Tape& tape, Var x, Parameter& gamma, Parameter* beta) && {
    const Var out = tape.make_var(
        std::move(y), x.needs_grad() || gamma.requires_grad() || (beta != nullptr && beta->requires_grad()));
    tape.record<LayerNormNode>(out, x, gamma, beta, std::move(mean), std::move(inverse));
    return out;
  }

  Tensor y, mean, inverse;
};

}  // namespace

Var layer_norm(Tape& tape, Var x, Parameter& gamma, Parameter* beta, double eps) {
  check_operand(tape, x, "LayerNorm");
  const Tape::OpScope scope(tape, "layer_norm", &gamma);
  NormResult made(tape, x, gamma, beta);
  tape.backend().layer_norm().forward(x.value(), gamma.value(), beta != nullptr ? beta->value() : Tensor(), eps, made.y,
                                      made.mean, made.inverse);
  return std::move(made).record(tape, x, gamma, beta);
}

SumAndNorm add_layer_norm(Tape& tape, Var x, Var y, Parameter& gamma, Parameter* beta, double eps) {
  check_addends(tape, x, y);
  const Tape::OpScope scope(tape, "add_layer_norm", &gamma);
  Tensor sum = tape.backend().empty(x.shape(), x.value().dtype());
  NormResult made(tape, x, gamma, beta);
  tape.backend().layer_norm().forward_added(x.value(), y.value(), gamma.value(),
                                            beta != nullptr ? beta->value() : Tensor(), eps, sum, made.y, made.mean,
                                            made.inverse);
  const Var both = tape.make_var(std::move(sum), x.needs_grad() || y.needs_grad());
  record_sum(tape, both, x, y);
  return {both, std::move(made).record(tape, both, gamma, beta)};
}

namespace {

void check_probability(double p) {
  check_usage(p >= 0.0 && p < 1.0, "dropout with a probability that is not in [0, 1)", "give one of 0 up to below 1");
}

struct Dropout {
  static constexpr const char* kName = "dropout";
  static constexpr bool kInPlace = true;
  double p;
  std::int64_t layer;
  static const Shape& shape(const Shape& x) { return x; }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().pointwise().dropout(x, p, tape.dropout_state(), layer, y);
  }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const { forward(tape, dy, dx); }
};

}  // namespace

void check_state(const Tape& tape, const char* what) {
  if (!tape.dropout_state().defined())
    throw UsageError(fmt::format("{} on a tape that knows no seed and step", what),
                     "give it one: Tape::set_dropout_state");
}

Var dropout(Tape& tape, Var x, double p, std::int64_t layer) {
  check_operand(tape, x, "Dropout");
  check_probability(p);
  if (p == 0.0) return x;
  check_state(tape, "dropout");
  return compute(tape, x, Dropout{p, layer});
}

Var randn(Tape& tape, const Shape& shape, std::int64_t layer) {
  check_state(tape, "randn");
  check_usage(shape.size() >= 1, "randn of a scalar", "its first axis is that of the samples");
  const Tape::OpScope scope(tape, "randn");
  const Tensor numbers = tape.backend().empty(shape);
  tape.backend().pointwise().normal(tape.dropout_state(), layer, numbers);
  if (tape.activations() == DType::kF32) return tape.make_var(numbers, false);
  Tensor rounded = tape.backend().empty(shape, tape.activations());
  tape.backend().pointwise().cast(numbers, rounded);
  return tape.make_var(std::move(rounded), false);
}

Var embedding(Tape& tape, const Tensor& tokens, Parameter& table) {
  const Tape::OpScope scope(tape, "embedding", &table);
  const int axes = tokens.shape().size();
  if (axes < 1 || axes >= Shape::kMaxDims || tokens.dtype() != DType::kI32)
    throw UsageError(fmt::format("an embedding was given {} of {}", to_string(tokens.shape()), name_of(tokens.dtype())),
                     "it takes numbers, i32");
  check_tensor(tape, tokens, DType::kI32, "an embedding was given numbers");
  check_parameter(tape, table, "Embedding");
  const DType dtype = tape.activations();
  Tensor y = tape.backend().empty(tokens.shape().with_last(table.value().size(1)), dtype);
  tape.backend().embedding().forward(table.as(dtype), tokens, y);
  const Var out = tape.make_var(std::move(y), table.requires_grad());
  tape.record<EmbeddingNode>(out, tokens, table);
  return out;
}

Var add_positions(Tape& tape, Var x, Parameter& table, std::int64_t first) {
  check_operand(tape, x, "add_positions");
  check_parameter(tape, table, "add_positions");
  const Tape::OpScope scope(tape, "add_positions", &table);
  const Shape& s = x.shape();
  if (s.size() != 3 || s[2] != table.value().size(1) || first < 0 || first + s[1] > table.value().size(0))
    throw UsageError(fmt::format("{} at positions from {} on, where there are {} of {} features", to_string(s), first,
                                 table.value().size(0), table.value().size(1)),
                     "give at most as many tokens as the model has positions (--context)");
  Tensor y = tape.backend().empty(s, x.value().dtype());
  tape.backend().embedding().add_rows(x.value(), table.as(x.value().dtype()), first, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad() || table.requires_grad());
  tape.record<AddPositionsNode>(out, x, table, first);
  return out;
}

RotaryAngles::RotaryAngles(Backend& backend, std::int64_t positions, std::int64_t head_dim, double base) {
  if (positions < 1 || head_dim < 2 || head_dim % 2 != 0 || !(base > 0.0))
    throw UsageError(
        fmt::format("rotary angles of {} positions for heads of {} features, base {:g}", positions, head_dim, base),
        "give at least one position, an even number of features, and a base above 0");
  const std::int64_t half = head_dim / 2;
  if (bytes(positions, head_dim) > kMostBytes)
    throw UsageError(fmt::format("rotary angles of {} positions for heads of {} features", positions, head_dim),
                     fmt::format("give at most {} positions (--context)", kMostBytes / bytes(1, head_dim)));
  cosines = backend.empty({positions, half});
  sines = backend.empty({positions, half});
  if (reinterpret_cast<std::uintptr_t>(cosines.raw()) >= kShapesAlone) return;
  std::vector<double> frequencies;
  for (std::int64_t d = 0; d < half; ++d)
    frequencies.push_back(std::pow(base, -2.0 * static_cast<double>(d) / static_cast<double>(head_dim)));
  std::vector<float> cosine, sine;
  for (std::int64_t position = 0; position < positions; ++position)
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      cosine.push_back(static_cast<float>(std::cos(angle)));
      sine.push_back(static_cast<float>(std::sin(angle)));
    }
  backend.upload(std::as_bytes(std::span(cosine)), cosines);
  backend.upload(std::as_bytes(std::span(sine)), sines);
}

namespace {

struct Rotary {
  static constexpr const char* kName = "rotary";
  RotaryAngles angles;
  std::int64_t first;
  static const Shape& shape(const Shape& x) { return x; }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().embedding().rotate(x, angles.cosines, angles.sines, first, false, y);
  }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const {
    tape.backend().embedding().rotate(dy, angles.cosines, angles.sines, first, true, dx);
  }
};

}  // namespace

Var rotary(Tape& tape, Var x, const RotaryAngles& angles, std::int64_t first) {
  check_operand(tape, x, "rotary");
  check_tensor(tape, angles.cosines, DType::kF32, "rotary was given cosines");
  check_tensor(tape, angles.sines, DType::kF32, "rotary was given sines");
  const Shape &s = x.shape(), &table = angles.cosines.shape();
  if (table.size() != 2 || angles.sines.shape() != table || s.size() != 3 || table[1] < 1 ||
      s[2] % (2 * table[1]) != 0 || first < 0 || first + s[1] > table[0])
    throw UsageError(
        fmt::format("rotary of {} at positions from {} on, by angles {}", to_string(s), first, to_string(table)),
        "it takes (N, T, heads · head_dim) at positions that have angles (positions, head_dim / 2)");
  return compute(tape, x, Rotary{angles, first});
}

namespace {

Var attend(Tape& tape, const std::array<Var, 3>& x, bool together, std::int64_t heads, AttentionOptions options) {
  const Tape::OpScope scope(tape, options.causal ? "causal_attention" : "attention");
  const AttentionInputs inputs = AttentionNode::inputs_of(x, together);
  const Shape& s = inputs.q.shape();
  if (options.lengths.defined()) {
    check_tensor(tape, options.lengths, DType::kI32, "attention was given lengths");
    if (options.lengths.shape() != Shape{s[0]})
      throw UsageError(
          fmt::format("attention over {} with lengths {}", to_string(s), to_string(options.lengths.shape())),
          "give each sample one length");
  }
  options.dropout_state = {};
  if (options.dropout != 0.0) {
    check_probability(options.dropout);
    check_state(tape, "attention's dropout");
    options.dropout_state = tape.dropout_state();
  }
  Tensor y = tape.backend().empty(s, inputs.q.dtype());
  Tensor log_sums = tape.backend().empty({s[0], heads, s[1]});
  tape.backend().attention().forward(inputs, heads, options, y, log_sums);
  const Var out = tape.make_var(std::move(y), x[0].needs_grad() || x[1].needs_grad() || x[2].needs_grad());
  tape.record<AttentionNode>(out, x, together, heads, std::move(options), std::move(log_sums));
  return out;
}

}  // namespace

Var attention(Tape& tape, Var qkv, std::int64_t heads, AttentionOptions options) {
  check_operand(tape, qkv, "attention");
  const Shape& s = qkv.shape();
  if (heads < 1 || s.size() != 3 || s[2] % (3 * heads) != 0)
    throw UsageError(fmt::format("attention with {} heads was given {}", heads, to_string(s)),
                     "it takes (N, T, 3 · C) with C a multiple of the heads");
  return attend(tape, {qkv, qkv, qkv}, true, heads, std::move(options));
}

Var attention(Tape& tape, Var q, Var k, Var v, std::int64_t heads, AttentionOptions options) {
  for (const Var one : {q, k, v}) {
    check_operand(tape, one, "attention");
    const Shape& s = one.shape();
    if (heads < 1 || s.size() != 3 || s[2] % heads != 0 || s != q.shape() || one.dtype() != q.dtype())
      throw UsageError(fmt::format("attention with {} heads was given {}, {} and {}", heads, to_string(q.shape()),
                                   to_string(k.shape()), to_string(v.shape())),
                       "it takes three (N, T, C) of one type, with C a multiple of the heads");
  }
  return attend(tape, {q, k, v}, false, heads, std::move(options));
}

}  // namespace lockstep::nn
