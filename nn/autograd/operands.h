// What operators ask of their operands before they compute. Compares alone: no element is looked at.
#pragma once

#include <array>
#include <utility>

#include "lockstep/nn/autograd/functions.h"

namespace lockstep::nn {

[[noreturn]] void refuse_operand(const Tape& tape, Var x, const char* op);
[[noreturn]] void refuse_parameter(const Tape& tape, const Parameter& parameter, const char* op);
[[noreturn]] void refuse_shape(const Tensor& value, const Shape& wanted, const char* what, const char* op);
[[noreturn]] void refuse_tensor(const Tape& tape, const Tensor& tensor, DType wanted, const char* what);

/// Throws UsageError unless `x` is of this tape's pass, not walked by backward yet, and f32, or bf16 or f16 where
/// the device computes in it.
inline void check_operand(const Tape& tape, Var x, const char* op) {
  if (!tape.has(x) || (tape.recording() && x.walked() && x.needs_grad())) [[unlikely]]
    refuse_operand(tape, x, op);
  const DType dtype = x.dtype();
  if (dtype != DType::kF32 && !tape.backend().computes_in(dtype)) [[unlikely]]
    refuse_operand(tape, x, op);
}

/// Throws UsageError unless the parameter is where the tape is: on its backend where it is trained, on its device where
/// it is read alone (Backend::make_stream).
inline void check_parameter(const Tape& tape, const Parameter& parameter, const char* op) {
  if (&parameter.backend() == &tape.backend()) return;
  if (tape.recording() || parameter.backend().device() != tape.backend().device())
    refuse_parameter(tape, parameter, op);
}

/// Of a parameter beside the first, such as a bias: nullptr is none. Throws UsageError where it is elsewhere, or has
/// another shape than kernels read.
inline void check_further(const Tape& tape, const Parameter* parameter, const Shape& wanted, const char* what,
                          const char* op) {
  if (parameter == nullptr) return;
  check_parameter(tape, *parameter, op);
  if (parameter->value().shape() != wanted) [[unlikely]]
    refuse_shape(parameter->value(), wanted, what, op);
}

/// Of labels, targets and numbers: throws UsageError unless it has this type, and is not another device's.
inline void check_tensor(const Tape& tape, const Tensor& tensor, DType wanted, const char* what) {
  const auto place = tensor.device();
  if (tensor.dtype() != wanted || (!tensor.defined() && tensor.count() > 0) ||
      (place && *place != tape.backend().device())) [[unlikely]]
    refuse_tensor(tape, tensor, wanted, what);
}

/// What a loss may do with the model's outputs: take their memory for their gradient where Tape::take_value() gives it.
enum class Outputs : std::uint8_t { kKept, kTaken };
Loss cross_entropy(Tape& tape, Var outputs, const Tensor& targets, float scale, const TargetRule& rule, Outputs use);

/// Note [Operators of one value]
/// An operator of one value is a struct: settings, kName, shape(x) of the result, and
///   forward(tape, x, y)           computes y, of x's type
///   backward(tape, x, y, dy, dx)  overwrites dx; reads of the values x and y those that it needs
/// and kInPlace if dx may be dy. compute() calls it, after the function has checked x (check_operand).
template <class Op>
class OperatorNode final : public Node {
 public:
  OperatorNode(Var output, Var x, Op op) : Node(output), x_(x), op_(std::move(op)) {}

  void backward(Tape& tape) override {
    const Tensor dy = tape.backend().contiguous(tape.take_grad(output()));
    constexpr bool kInPlace = requires { Op::kInPlace; };
    Tensor dx = kInPlace && dy.is_sole_owner() ? dy : tape.backend().empty(x_.shape(), dy.dtype());
    op_.backward(tape, x_, output(), dy, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Op op_;
};
template <class Op>
Var compute(Tape& tape, Var x, Op op) {
  const Tape::OpScope scope(tape, Op::kName);
  Tensor y = tape.backend().empty(op.shape(x.shape()), x.dtype());
  op.forward(tape, x.value(), y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<OperatorNode<Op>>(out, x, std::move(op));
  return out;
}

/// variable() of one type.
Var variable(Tape& tape, Parameter& parameter, DType dtype);
/// x in another type; x itself where it has that.
Var cast(Tape& tape, Var x, DType dtype, const char* name);
/// compute(x) of f32, rounded to x's type.
template <class Compute>
Var in_f32(Tape& tape, Var x, const Compute& compute) {
  return cast(tape, compute(to_f32(tape, x)), x.dtype(), "to_activations");
}
/// Both in one shape, which each broadcasts to as in PyTorch. Throws UsageError where there is none, and for two types.
std::array<Var, 2> broadcast(Tape& tape, Var x, Var y, const char* op);

/// Throws UsageError unless the tape knows what random numbers hang on.
void check_state(const Tape& tape, const char* what);

/// `groups`. Throws UsageError unless it divides a convolution's channels, `in` and `out`.
std::int64_t valid_groups(std::int64_t in, std::int64_t out, std::int64_t groups, const char* op);
/// epilogue(x) of those that are functions of their own: not of GELU.
Var activated(Tape& tape, Var x, Epilogue epilogue);

/// Throws UsageError unless x + y can be computed.
void check_addends(const Tape& tape, Var x, Var y);
/// For operators: records that `sum` is x + y.
void record_sum(Tape& tape, Var sum, Var x, Var y);

}  // namespace lockstep::nn
