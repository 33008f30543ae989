#include "nn/autograd/functions.h"

namespace lockstep::nn {
namespace {

class ReluNode final : public Node {
 public:
  ReluNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override { tape.contribute(x_, tape.take_grad_through(output(), Epilogue::kRelu)); }

 private:
  Var x_;
};

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

class FlattenNode final : public Node {
 public:
  FlattenNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override {
    const Shape& s = x_.shape();
    const Tensor& dy = tape.grad(output());
    if (s[3] == 1 || s[1] * s[2] == 1) {
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

Var relu(Tape& tape, Var x) {
  const Tape::OpScope scope(tape, "relu");
  Tensor y = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().pointwise().relu(x.value(), y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<ReluNode>(out, x);
  return out;
}

namespace {

void check_addends(Var x, Var y) {
  if (x.shape() != y.shape() || x.value().dtype() != y.value().dtype())
    throw UsageError(fmt::format("add of {} and {}", to_string(x.shape()), to_string(y.shape())),
                     "operands have one shape; nothing is broadcast");
}

}  // namespace

Var add_relu(Tape& tape, Var x, Var y) {
  const Tape::OpScope scope(tape, "add_relu");
  check_addends(x, y);
  Tensor z = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().pointwise().add_relu(x.value(), y.value(), z);
  const Var out = tape.make_var(std::move(z), x.needs_grad() || y.needs_grad());
  tape.record<AddReluNode>(out, x, y);
  return out;
}

Var add(Tape& tape, Var x, Var y) {
  const Tape::OpScope scope(tape, "add");
  check_addends(x, y);
  Tensor z = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().pointwise().add(x.value(), y.value(), z);
  const Var out = tape.make_var(std::move(z), x.needs_grad() || y.needs_grad());
  tape.record<AddNode>(out, x, y);
  return out;
}

Var flatten(Tape& tape, Var x) {
  const Tape::OpScope scope(tape, "flatten");
  const Shape& s = x.shape();
  if (s.size() == 2) return x;
  if (s.size() != 4)
    throw UsageError(fmt::format("flatten was given {}", to_string(s)), "it takes (N, H, W, C) or (N, F)");
  const Shape flat = {s[0], s[1] * s[2] * s[3]};
  Tensor y;
  if (s[3] == 1 || s[1] * s[2] == 1) {
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
