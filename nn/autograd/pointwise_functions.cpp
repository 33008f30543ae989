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

}  // namespace

void check_addends(const Tape& tape, Var x, Var y) {
  check_operand(tape, x, "add");
  check_operand(tape, y, "add");
  if (x.shape() != y.shape() || x.value().dtype() != y.value().dtype())
    throw UsageError(fmt::format("add of {} and {}", to_string(x.shape()), to_string(y.shape())),
                     "give both one shape and type");
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
  check_operand(tape, x, "add");
  check_operand(tape, y, "add");
  if (x.shape() != y.shape() || x.dtype() != y.dtype()) {
    const auto [a, b] = broadcast(tape, x, y, "add");
    return add(tape, a, b);
  }
  const Tape::OpScope scope(tape, "add");
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
