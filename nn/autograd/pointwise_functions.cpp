#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn {
namespace {

class AddNode final : public Node {
 public:
  AddNode(Var output, Var x, Var y) : Node(output), x_(x), y_(y) {}
  void backward(Tape& tape) override {
    tape.contribute(x_, tape.grad(output()));
    tape.contribute(y_, tape.grad(output()));
  }

 private:
  Var x_, y_;
};

class AddReluNode final : public Node {
 public:
  AddReluNode(Var output, Var x, Var y) : Node(output), x_(x), y_(y) {}
  void backward(Tape& tape) override {
    const Tensor gradient = tape.take_grad_through(output(), Epilogue::kRelu);
    tape.contribute(x_, gradient);
    tape.contribute(y_, gradient);
  }

 private:
  Var x_, y_;
};

/// Whether (N, F) is the same memory.
bool is_flat(const Shape& s) { return s.size() == 3 || s[3] == 1 || s[1] * s[2] == 1; }

class FlattenNode final : public Node {
 public:
  FlattenNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override {
    const Shape& s = x_.shape();
    const Tensor& dy = tape.grad(output());
    if (is_flat(s)) {
      tape.contribute(x_, dy.reshaped(s));
      return;
    }
    Tensor dx = tape.backend().empty(s, dy.dtype());
    tape.backend().pointwise().swap_last_axes(dy.reshaped({s[0], s[3], s[1] * s[2]}),
                                              dx.reshaped({s[0], s[1] * s[2], s[3]}));
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
};

/// (A, B, …) → (B, A, …): (A, B · F) turned round is (B, F, A), and each of those turned round is (A, F).
Tensor with_first_axes_swapped(Backend& backend, const Tensor& x) {
  Shape swapped = x.shape();
  std::swap(swapped[0], swapped[1]);
  const std::int64_t a = x.size(0), b = x.size(1);
  if (a == 1 || b == 1 || x.count() == 0) return x.reshaped(swapped);
  const std::int64_t features = x.count() / (a * b);
  const Tensor turned = backend.empty({b, features, a}, x.dtype());
  backend.pointwise().swap_last_axes(x.reshaped({1, a, b * features}), turned.reshaped({1, b * features, a}));
  if (features == 1) return turned.reshaped(swapped);
  const Tensor y = backend.empty(swapped, x.dtype());
  backend.pointwise().swap_last_axes(turned, y.reshaped({b, a, features}));
  return y;
}

class SwapFirstAxesNode final : public Node {
 public:
  SwapFirstAxesNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override {
    tape.contribute(x_, with_first_axes_swapped(tape.backend(), tape.grad(output())));
  }

 private:
  Var x_;
};

class ConcatLastNode final : public Node {
 public:
  ConcatLastNode(Var output, Var x, Var y) : Node(output), x_(x), y_(y) {}
  void backward(Tape& tape) override {
    const Tensor& dz = tape.grad(output());
    const std::int64_t columns = x_.shape()[x_.shape().size() - 1];
    const auto take = [&](Var part, std::int64_t begin) {
      if (!part.needs_grad()) return;
      Tensor own = tape.backend().empty(part.shape(), dz.dtype());
      tape.backend().pointwise().copy_rows(dz.columns(begin, begin + columns), own);
      tape.contribute(part, std::move(own));
    };
    take(x_, 0);
    take(y_, columns);
  }

 private:
  Var x_, y_;
};

}  // namespace

Var concat_last(Tape& tape, Var x, Var y) {
  check_operand(tape, x, "concat_last");
  check_operand(tape, y, "concat_last");
  const Tape::OpScope scope(tape, "concat_last");
  const int axes = x.shape().size();
  if (axes < 1 || x.shape() != y.shape() || x.dtype() != y.dtype() || x.shape()[axes - 1] < 1)
    throw UsageError(fmt::format("{} of {} beside {} of {}", to_string(x.shape()), name_of(x.dtype()),
                                 to_string(y.shape()), name_of(y.dtype())),
                     "give two of one shape and type");
  Backend& backend = tape.backend();
  const std::int64_t columns = x.shape()[axes - 1];
  Shape shape = x.shape();
  shape[axes - 1] = 2 * columns;
  Tensor both = backend.empty(shape, x.dtype());
  backend.pointwise().copy_rows(x.value(), both.columns(0, columns));
  backend.pointwise().copy_rows(y.value(), both.columns(columns, 2 * columns));
  const Var out = tape.make_var(std::move(both), x.needs_grad() || y.needs_grad());
  tape.record<ConcatLastNode>(out, x, y);
  return out;
}

Var swap_first_axes(Tape& tape, Var x) {
  check_operand(tape, x, "swap_first_axes");
  const Tape::OpScope scope(tape, "swap_first_axes");
  if (x.shape().size() < 3)
    throw UsageError(fmt::format("the first axes of {} are to be swapped", to_string(x.shape())),
                     "give it at least three axes");
  const Var out = tape.make_var(with_first_axes_swapped(tape.backend(), x.value()), x.needs_grad());
  tape.record<SwapFirstAxesNode>(out, x);
  return out;
}

void check_addends(const Tape& tape, Var x, Var y) {
  check_operand(tape, x, "add");
  check_operand(tape, y, "add");
  if (x.shape() != y.shape() || x.value().dtype() != y.value().dtype())
    throw UsageError(fmt::format("add of {} and {}", to_string(x.shape()), to_string(y.shape())),
                     "operands have one shape; nothing is broadcast");
}

void record_sum(Tape& tape, Var sum, Var x, Var y) { tape.record<AddNode>(sum, x, y); }

Var add_relu(Tape& tape, Var x, Var y) {
  const Tape::OpScope scope(tape, "add_relu");
  check_addends(tape, x, y);
  Tensor z = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().pointwise().binary(BinaryOp::kAddRelu, x.value(), y.value(), z);
  const Var out = tape.make_var(std::move(z), x.needs_grad() || y.needs_grad());
  tape.record<AddReluNode>(out, x, y);
  return out;
}

Var add(Tape& tape, Var x, Var y) {
  const Tape::OpScope scope(tape, "add");
  check_addends(tape, x, y);
  Tensor z = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().pointwise().binary(BinaryOp::kAdd, x.value(), y.value(), z);
  const bool needs_grad = x.needs_grad() || y.needs_grad(), are_losses = x.is_loss() && y.is_loss();
  if (are_losses && x.counts() != y.counts())  // a count and NaN
    tape.backend().pointwise().copy((x.counts() ? x : y).value().slice(1, 2), z.slice(1, 2));
  // The sum of two losses is one.
  const Var out = are_losses ? tape.make_loss(std::move(z), needs_grad, x.counts() || y.counts())
                             : tape.make_var(std::move(z), needs_grad);
  record_sum(tape, out, x, y);
  return out;
}

Var flatten(Tape& tape, Var x) {
  check_operand(tape, x, "Flatten");
  const Tape::OpScope scope(tape, "flatten");
  const Shape& s = x.shape();
  if (s.size() == 2) return x;
  if (s.size() != 4 && s.size() != 3)
    throw UsageError(fmt::format("flatten was given {}", to_string(s)), "it takes (N, H, W, C), (N, T, F) or (N, F)");
  const Shape flat = {s[0], s.size() == 3 ? s[1] * s[2] : s[1] * s[2] * s[3]};
  Tensor y;
  if (is_flat(s)) {
    y = x.value().reshaped(flat);  // both orders are the same
  } else {
    y = tape.backend().empty(flat, x.value().dtype());
    tape.backend().pointwise().swap_last_axes(x.value().reshaped({s[0], s[1] * s[2], s[3]}),
                                              y.reshaped({s[0], s[3], s[1] * s[2]}));
  }
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<FlattenNode>(out, x);
  return out;
}

}  // namespace lockstep::nn
