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

// The kernels are a device's (Note [Operators]).
template <class Op>
struct DeviceOperator : Op {
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().operators().forward(static_cast<const Op&>(*this), x, y);
  }
  void backward(Tape& tape, Var x, Var y, const Tensor& dy, const Tensor& dx) const {
    constexpr bool kNeedsX = requires { Op::kReadsX; };
    constexpr bool kNeedsY = requires { Op::kReadsY; };
    tape.backend().operators().backward(static_cast<const Op&>(*this), kNeedsX ? x.value() : Tensor(),
                                        kNeedsY ? y.value() : Tensor(), dy, dx);
  }
};

class SumNode final : public Node {
 public:
  SumNode(Var output, Var x, float scale, Tensor times)
      : Node(output), x_(x), scale_(scale), times_(std::move(times)) {}
  void backward(Tape& tape) override {
    Tensor dx = tape.backend().empty(x_.shape());
    if (times_.defined()) {
      OperatorKernels& kernels = tape.backend().operators();
      kernels.forward(SpreadLast{dx.count()}, times_, dx);
      kernels.forward(Affine{scale_}, dx, dx);
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

// Whether it is to be computed in f32, and rounded.
template <class Rule>
bool is_widened(Var x) {
  return !Rule::kAllTypes && x.dtype() != DType::kF32;
}

Var unary(Tape& tape, Var x, UnaryOp op) {
  return with_rule(op, [&]<class Rule>(Rule, const OpNames& names) {
    check_operand(tape, x, names.title);
    if (is_widened<Rule>(x)) return in_f32(tape, x, [&](Var wide) { return unary(tape, wide, op); });
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
    check_operand(tape, x, names.title);
    check_operand(tape, y, names.title);
    if (x.shape() != y.shape() || x.dtype() != y.dtype()) {
      const auto [a, b] = broadcast(tape, x, y, names.title);
      return binary(tape, a, b, op);
    }
    if (is_widened<Rule>(x)) return in_f32(tape, x, [&](Var wide) { return binary(tape, wide, to_f32(tape, y), op); });
    const Tape::OpScope scope(tape, names.function);
    Tensor z = tape.backend().empty(x.shape(), x.dtype());
    tape.backend().pointwise().binary(op, x.value(), y.value(), z);
    const Var out = tape.make_var(std::move(z), x.needs_grad() || y.needs_grad());
    tape.record<BinaryNode>(out, x, y, op);
    return out;
  });
}

}  // namespace

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

Var apply(Tape& tape, Var x, const Operator& op) {
  return std::visit(
      [&]<class Op>(const Op& one) {
        check_operand(tape, x, Op::kName);
        return in_f32(tape, x, [&](Var wide) { return compute(tape, wide, DeviceOperator<Op>{one}); });
      },
      op);
}

Loss sum(Tape& tape, Var x, float scale) {
  check_f32(tape, x, "sum");
  if (!std::isfinite(scale))
    throw UsageError(fmt::format("a loss scaled by {}", scale), "scale it by 1 / targets of all ranks");
  const Tape::OpScope op(tape, "sum");
  Tensor totals = tape.backend().empty({2});
  tape.backend().loss().total(x.value(), totals);
  const Var out = tape.make_loss(std::move(totals), x.needs_grad(), /*counts=*/false);
  tape.record<SumNode>(out, x, scale, tape.loss_scale());
  return {out};
}

}  // namespace lockstep::nn
