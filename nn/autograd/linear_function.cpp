#include <algorithm>
#include <optional>

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
  check_usage(epilogue != Epilogue::kRelu6, "a ReLU6 inside of a fully connected layer, which has none",
              "apply nn::relu6() to what it returns");
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

namespace {

// op(a) (B, M, K) · op(b) (B, K, N), and each gradient as a product of the same kind.
class MatmulNode final : public Node {
 public:
  MatmulNode(Var output, Var a, bool a_turned, Var b, bool b_turned)
      : Node(output), a_(a), b_(b), of_a_(a.value()), of_b_(b.value()), a_turned_(a_turned), b_turned_(b_turned) {}
  void backward(Tape& tape) override {
    LinearKernels& kernels = tape.backend().linear();
    const Tensor& dc = tape.grad(output());
    if (a_.needs_grad()) {
      Tensor da = tape.backend().empty(a_.shape(), dc.dtype());
      if (a_turned_)
        kernels.multiply(of_b_, b_turned_, dc, true, da);
      else
        kernels.multiply(dc, false, of_b_, !b_turned_, da);
      tape.contribute(a_, std::move(da));
    }
    if (b_.needs_grad()) {
      Tensor db = tape.backend().empty(b_.shape(), dc.dtype());
      if (b_turned_)
        kernels.multiply(dc, true, of_a_, a_turned_, db);
      else
        kernels.multiply(of_a_, !a_turned_, dc, false, db);
      tape.contribute(b_, std::move(db));
    }
  }

 private:
  Var a_, b_;
  Tensor of_a_, of_b_;
  bool a_turned_, b_turned_;
};

// (…, R, C) → (the others' product, R, C)
Var as_matrices(Tape& tape, Var x) {
  const Shape& s = x.shape();
  std::int64_t batch = 1;
  for (int axis = 0; axis + 2 < s.size(); ++axis) batch *= s[axis];
  const Shape flat = {batch, s[s.size() - 2], s[s.size() - 1]};
  return s == flat ? x : reshape(tape, x, flat);
}

// `leading` without its last two axes, then these.
Shape with_matrix(const Shape& leading, std::int64_t rows, std::int64_t columns) {
  Shape s = leading;
  s[s.size() - 2] = rows;
  s[s.size() - 1] = columns;
  return s;
}

// The shape that the leading axes of both broadcast to, with two more axes; none where they do not fit.
std::optional<Shape> leading_of(const Shape& a, const Shape& b) {
  Shape longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  for (int back = 3; back <= shorter.size(); ++back) {
    std::int64_t& extent = longer[longer.size() - back];
    const std::int64_t other = shorter[shorter.size() - back];
    if (extent != other && extent != 1 && other != 1) return std::nullopt;
    if (extent == 1) extent = other;
  }
  return longer;
}

}  // namespace

Var matmul(Tape& tape, Var a, Var b, Turned turned) {
  check_operand(tape, a, "matmul");
  check_operand(tape, b, "matmul");
  const Shape &of_a = a.shape(), &of_b = b.shape();
  const int last_a = of_a.size() - 1, last_b = of_b.size() - 1;
  const std::optional<Shape> leading = last_a >= 1 && last_b >= 1 ? leading_of(of_a, of_b) : std::nullopt;
  const auto inner = [](const Shape& s, bool last) { return s[s.size() - (last ? 1 : 2)]; };
  if (!leading || inner(of_a, !turned.a) != inner(of_b, turned.b) || a.dtype() != b.dtype())
    throw UsageError(
        fmt::format("matmul of {} {}{} and {} {}{}", name_of(a.dtype()), to_string(of_a), turned.a ? " turned" : "",
                    name_of(b.dtype()), to_string(of_b), turned.b ? " turned" : ""),
        "it takes (…, M, K) and (…, K, N) of one type, whose leading axes broadcast");
  const std::int64_t rows = inner(of_a, turned.a), columns = inner(of_b, !turned.b);
  const Shape result = with_matrix(*leading, rows, columns);
  Var left = a, right = b;
  if (last_b == 1 && !turned.a) {
    std::int64_t all = 1;
    for (int axis = 0; axis < last_a; ++axis) all *= of_a[axis];
    left = reshape(tape, a, {1, all, of_a[last_a]});  // one product
  } else if (last_a > 1 || last_b > 1) {
    left = broadcast_to(tape, a, with_matrix(*leading, of_a[last_a - 1], of_a[last_a]));
    right = broadcast_to(tape, b, with_matrix(*leading, of_b[last_b - 1], of_b[last_b]));
  }
  left = as_matrices(tape, left);
  right = as_matrices(tape, right);
  Var product;
  {
    const Tape::OpScope scope(tape, "matmul");
    Tensor c = tape.backend().empty({left.shape()[0], left.shape()[turned.a ? 2 : 1], columns}, a.dtype());
    tape.backend().linear().multiply(left.value(), turned.a, right.value(), turned.b, c);
    product = tape.make_var(std::move(c), left.needs_grad() || right.needs_grad());
    tape.record<MatmulNode>(product, left, turned.a, right, turned.b);
  }
  return product.shape() == result ? product : reshape(tape, product, result);
}

}  // namespace lockstep::nn
