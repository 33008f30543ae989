#include <cmath>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn {
namespace {

class CastNode final : public Node {
 public:
  CastNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(dy.shape(), x_.dtype());
    tape.backend().pointwise().cast(dy, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
};

class UnaryNode final : public Node {
 public:
  UnaryNode(Var output, Var x, UnaryOp op) : Node(output), x_(x), op_(op) {}
  void backward(Tape& tape) override {
    const Tensor dy = tape.take_grad(output());
    Tensor dx = dy.is_sole_owner() ? dy : tape.backend().empty(dy.shape(), dy.dtype());
    with_rule(op_, [&]<class Rule>(Rule, const OpNames&) {
      tape.backend().pointwise().unary_backward(op_, Rule::kReadsX ? x_.value() : Tensor(),
                                                Rule::kReadsY ? output().value() : Tensor(), dy, dx);
    });
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  UnaryOp op_;
};

class BinaryNode final : public Node {
 public:
  BinaryNode(Var output, Var x, Var y, BinaryOp op)
      : Node(output), x_(x), y_(y), of_x_(x.value()), of_y_(y.value()), op_(op) {}
  void backward(Tape& tape) override {
    const Tensor dz = tape.take_grad(output());
    Tensor dx, dy;
    if (x_.needs_grad()) dx = tape.backend().empty(dz.shape());
    if (y_.needs_grad()) dy = tape.backend().empty(dz.shape());
    tape.backend().pointwise().binary_backward(op_, of_x_, of_y_, dz, dx, dy);
    if (dx.defined()) tape.contribute(x_, std::move(dx));
    if (dy.defined()) tape.contribute(y_, std::move(dy));
  }

 private:
  Var x_, y_;
  Tensor of_x_, of_y_;
  BinaryOp op_;
};

class AffineNode final : public Node {
 public:
  AffineNode(Var output, Var x, float scale) : Node(output), x_(x), scale_(scale) {}
  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(dy.shape());
    tape.backend().elementwise().affine(dy, scale_, 0.0f, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  float scale_;
};

// (M) as (M, C), or (M, C) as (M): one is the other's gradient.
Tensor rows_of(const Tensor& x, std::int64_t columns) { return x.reshaped({x.count() / columns, columns}); }

class SumLastNode final : public Node {
 public:
  SumLastNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override {
    const Shape& shape = x_.shape();
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(shape);
    tape.backend().elementwise().broadcast_rows(dy.reshaped({dy.count()}), rows_of(dx, shape[shape.size() - 1]));
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
};

class SpreadLastNode final : public Node {
 public:
  SpreadLastNode(Var output, Var x, std::int64_t count) : Node(output), x_(x), count_(count) {}
  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(x_.shape());
    tape.backend().elementwise().sum_rows(rows_of(dy, count_), dx.reshaped({dx.count()}));
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  std::int64_t count_;
};

class SumNode final : public Node {
 public:
  SumNode(Var output, Var x, float scale, Tensor times)
      : Node(output), x_(x), scale_(scale), times_(std::move(times)) {}
  void backward(Tape& tape) override {
    Tensor dx = tape.backend().empty(x_.shape());
    if (times_.defined()) {
      auto& elementwise = tape.backend().elementwise();
      elementwise.broadcast_rows(times_.reshaped({1}), dx.reshaped({1, dx.count()}));
      elementwise.affine(dx, scale_, 0.0f, dx);
    } else {
      tape.backend().pointwise().fill(dx, scale_);
    }
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  float scale_;
  Tensor times_;  // Tape::loss_scale()
};

void check_f32(const Tape& tape, Var x, const char* op) {
  check_operand(tape, x, op);
  if (x.dtype() == DType::kF32) return;
  throw UsageError(fmt::format("{} of {}, where it computes in f32", op, name_of(x.dtype())),
                   "give it nn::to_f32(tape, x)");
}

template <class Rule>
void check_operand_of(const Tape& tape, Var x, const char* title) {
  if constexpr (Rule::kAllTypes)
    check_operand(tape, x, title);
  else
    check_f32(tape, x, title);
}

Var unary(Tape& tape, Var x, UnaryOp op) {
  return with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
    check_operand_of<Rule>(tape, x, names.title);
    const Tape::OpScope scope(tape, names.function);
    Tensor y = tape.backend().empty(x.shape(), x.dtype());
    tape.backend().pointwise().unary(op, x.value(), y);
    const Var out = tape.make_var(std::move(y), x.needs_grad());
    tape.record<UnaryNode>(out, x, op);
    return out;
  });
}

Var binary(Tape& tape, Var x, Var y, BinaryOp op) {
  return with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
    check_operand_of<Rule>(tape, x, names.title);
    check_operand_of<Rule>(tape, y, names.title);
    const Tape::OpScope scope(tape, names.function);
    if (x.shape() != y.shape() || x.dtype() != y.dtype())
      throw UsageError(fmt::format("{} of {} and {}", names.title, to_string(x.shape()), to_string(y.shape())),
                       "operands have one shape; nothing is broadcast");
    Tensor z = tape.backend().empty(x.shape(), x.dtype());
    tape.backend().pointwise().binary(op, x.value(), y.value(), z);
    const Var out = tape.make_var(std::move(z), x.needs_grad() || y.needs_grad());
    tape.record<BinaryNode>(out, x, y, op);
    return out;
  });
}

Var cast(Tape& tape, Var x, DType dtype, const char* name) {
  check_operand(tape, x, name);
  if (x.dtype() == dtype) return x;
  const Tape::OpScope scope(tape, name);
  Tensor y = tape.backend().empty(x.shape(), dtype);
  tape.backend().pointwise().cast(x.value(), y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<CastNode>(out, x);
  return out;
}

}  // namespace

Var to_f32(Tape& tape, Var x) { return cast(tape, x, DType::kF32, "to_f32"); }
Var to_activations(Tape& tape, Var x) { return cast(tape, x, tape.activations(), "to_activations"); }

#define LOCKSTEP_UNARY_FUNCTION(Name, function, title) \
  Var function(Tape& tape, Var x) { return unary(tape, x, UnaryOp::k##Name); }
#define LOCKSTEP_BINARY_FUNCTION(Name, function, title) \
  Var function(Tape& tape, Var x, Var y) { return binary(tape, x, y, BinaryOp::k##Name); }
LOCKSTEP_UNARY_FUNCTIONS(LOCKSTEP_UNARY_FUNCTION)
LOCKSTEP_BINARY_FUNCTIONS(LOCKSTEP_BINARY_FUNCTION)
#undef LOCKSTEP_UNARY_FUNCTION
#undef LOCKSTEP_BINARY_FUNCTION

Var gelu(Tape& tape, Var x, GeluKind kind) { return unary(tape, x, op_of(kind)); }

Var affine(Tape& tape, Var x, float scale, float shift) {
  check_f32(tape, x, "affine");
  const Tape::OpScope op(tape, "affine");
  Tensor y = tape.backend().empty(x.shape());
  tape.backend().elementwise().affine(x.value(), scale, shift, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<AffineNode>(out, x, scale);
  return out;
}

Var sum_last(Tape& tape, Var x) {
  check_f32(tape, x, "sum_last");
  const Tape::OpScope scope(tape, "sum_last");
  const Shape& shape = x.shape();
  const int axes = shape.size() - 1;
  if (axes < 0 || shape[axes] < 1)
    throw UsageError(fmt::format("sum_last of {}", to_string(shape)), "its last axis has at least one number");
  Tensor y = tape.backend().empty(Shape(shape.dims().first(static_cast<std::size_t>(axes))));
  tape.backend().elementwise().sum_rows(rows_of(x.value(), shape[axes]), y.reshaped({y.count()}));
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<SumLastNode>(out, x);
  return out;
}

Var spread_last(Tape& tape, Var x, std::int64_t count) {
  check_f32(tape, x, "spread_last");
  const Tape::OpScope scope(tape, "spread_last");
  if (count < 1 || x.shape().size() == Shape::kMaxDims)
    throw UsageError(fmt::format("spread_last of {} over {}", to_string(x.shape()), count),
                     fmt::format("give at least 1, and at most {} axes", Shape::kMaxDims - 1));
  std::vector<std::int64_t> dims(x.shape().dims().begin(), x.shape().dims().end());
  dims.push_back(count);
  Tensor y = tape.backend().empty(Shape(std::span<const std::int64_t>(dims)));
  tape.backend().elementwise().broadcast_rows(x.value().reshaped({x.shape().count()}), rows_of(y, count));
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<SpreadLastNode>(out, x, count);
  return out;
}

Loss sum(Tape& tape, Var x, float scale) {
  check_f32(tape, x, "sum");
  if (!std::isfinite(scale))
    throw UsageError(fmt::format("a loss scaled by {}", scale), "scale it by 1 / targets of all ranks");
  const Tape::OpScope op(tape, "sum");
  Tensor totals = tape.backend().empty({2});
  tape.backend().elementwise().total(x.value(), totals);
  const Var out = tape.make_loss(std::move(totals), x.needs_grad(), /*counts=*/false);
  tape.record<SumNode>(out, x, scale, tape.loss_scale());
  return {out};
}

}  // namespace lockstep::nn
