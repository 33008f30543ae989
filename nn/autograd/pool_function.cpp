#include "nn/autograd/functions.h"

namespace lockstep::nn {
namespace {

class PoolNode final : public Node {
 public:
  PoolNode(Var output, PoolKind kind, Var x, const Window& window, Tensor choices)
      : Node(output), kind_(kind), x_(x), window_(window), choices_(std::move(choices)) {}

  void backward(Tape& tape) override {
    Tensor dx = tape.backend().empty(x_.shape());
    tape.backend().pool().backward(kind_, tape.grad(output()), choices_, window_, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  PoolKind kind_;
  Var x_;
  Window window_;
  Tensor choices_;
};

}  // namespace

Var pool2d(Tape& tape, PoolKind kind, Var x, const Window& window) {
  const Tape::OpScope scope(tape, kind == PoolKind::kMax ? "max_pool2d" : "avg_pool2d");
  if (x.shape().size() != 4)
    throw UsageError(fmt::format("pooling was given {}", to_string(x.shape())), "images are (N, H, W, C)");
  for (std::size_t axis = 0; axis < 2; ++axis)
    if (2 * window.padding[axis] > window.kernel[axis])
      throw UsageError(
          fmt::format("pooling with a window of {} and padding {}", window.kernel[axis], window.padding[axis]),
          "pad by at most half of the window, so that every window sees the input");
  Tensor y = tape.backend().empty(
      {x.shape()[0], window.output_extent(0, x.shape()[1]), window.output_extent(1, x.shape()[2]), x.shape()[3]});
  Tensor choices = tape.backend().pool().forward(kind, x.value(), window, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<PoolNode>(out, kind, x, window, std::move(choices));
  return out;
}

}  // namespace lockstep::nn
