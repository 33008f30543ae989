#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

class MaxPoolNode final : public Node {
 public:
  MaxPoolNode(Var output, Var x, const Window& window, Tensor choices)
      : Node(output), x_(x), window_(window), choices_(std::move(choices)) {}

  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(x_.shape(), dy.dtype());
    tape.backend().pool().max_backward(dy, choices_, window_, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Window window_;
  Tensor choices_;
};

class AveragePoolNode final : public Node {
 public:
  AveragePoolNode(Var output, Var x, const Window& window) : Node(output), x_(x), window_(window) {}

  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(x_.shape(), dy.dtype());
    tape.backend().pool().average_backward(dy, window_, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Window window_;
};

class AdaptiveAveragePoolNode final : public Node {
 public:
  AdaptiveAveragePoolNode(Var output, Var x) : Node(output), x_(x) {}

  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    Tensor dx = tape.backend().empty(x_.shape(), dy.dtype());
    tape.backend().pool().adaptive_average_backward(dy, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
};

}  // namespace

Shape pooled_shape(const Shape& x, const Window& window) {
  if (x.size() != 4) throw UsageError(fmt::format("pooling was given {}", to_string(x)), "images are (N, H, W, C)");
  for (std::size_t axis = 0; axis < 2; ++axis)
    if (2 * window.padding[axis] > window.kernel[axis])
      throw UsageError(
          fmt::format("pooling with a window of {} and padding {}", window.kernel[axis], window.padding[axis]),
          "pad by at most half of the window, so that every window sees the input");
  return {x[0], window.output_extent(0, x[1]), window.output_extent(1, x[2]), x[3]};
}

Var pool2d(Tape& tape, PoolKind kind, Var x, const Window& window) {
  check_operand(tape, x, kind == PoolKind::kMax ? "MaxPool2d" : "AvgPool2d");
  const Tape::OpScope scope(tape, kind == PoolKind::kMax ? "max_pool2d" : "avg_pool2d");
  Backend& backend = tape.backend();
  Tensor y = backend.empty(pooled_shape(x.shape(), window), x.value().dtype());
  if (kind == PoolKind::kAverage) {
    backend.pool().average_forward(x.value(), window, y);
    const Var out = tape.make_var(std::move(y), x.needs_grad());
    tape.record<AveragePoolNode>(out, x, window);
    return out;
  }
  Tensor choices;
  if (tape.recording() && x.needs_grad()) choices = backend.empty(y.shape(), PoolKernels::choice_type(window));
  backend.pool().max_forward(x.value(), window, Epilogue::kNone, y, choices);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<MaxPoolNode>(out, x, window, std::move(choices));
  return out;
}

Var adaptive_avg_pool2d(Tape& tape, Var x, std::int64_t height, std::int64_t width) {
  check_operand(tape, x, "AdaptiveAvgPool2d");
  const Tape::OpScope scope(tape, "adaptive_avg_pool2d");
  const Shape& s = x.shape();
  if (s.size() != 4 || s[1] < 1 || s[2] < 1 || height < 1 || width < 1)
    throw UsageError(fmt::format("adaptive pooling of {} to {} x {}", to_string(s), height, width),
                     "images are (N, H, W, C), and no extent is 0");
  Tensor y = tape.backend().empty({s[0], height, width, s[3]}, x.value().dtype());
  tape.backend().pool().adaptive_average_forward(x.value(), y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<AdaptiveAveragePoolNode>(out, x);
  return out;
}

}  // namespace lockstep::nn
