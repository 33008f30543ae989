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

struct AveragePool {
  static constexpr const char* kName = "avg_pool2d";
  Window window;
  Shape shape(const Shape& x) const { return pooled_shape(x, window); }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().pool().average_forward(x, window, y);
  }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const {
    tape.backend().pool().average_backward(dy, window, dx);
  }
};

struct AdaptiveAveragePool {
  static constexpr const char* kName = "adaptive_avg_pool2d";
  std::int64_t height, width;
  Shape shape(const Shape& x) const {
    if (x.size() != 4 || x[1] < 1 || x[2] < 1 || height < 1 || width < 1)
      throw UsageError(fmt::format("adaptive pooling of {} to {} x {}", to_string(x), height, width),
                       "images are (N, H, W, C), and no extent is 0");
    return {x[0], height, width, x[3]};
  }
  static void forward(Tape& tape, const Tensor& x, const Tensor& y) {
    tape.backend().pool().adaptive_average_forward(x, y);
  }
  static void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) {
    tape.backend().pool().adaptive_average_backward(dy, dx);
  }
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
  if (kind == PoolKind::kAverage) return compute(tape, x, AveragePool{window});
  const Tape::OpScope scope(tape, "max_pool2d");
  Backend& backend = tape.backend();
  Tensor y = backend.empty(pooled_shape(x.shape(), window), x.value().dtype()), choices;
  if (tape.recording() && x.needs_grad()) choices = backend.empty(y.shape(), PoolKernels::choice_type(window));
  backend.pool().max_forward(x.value(), window, Epilogue::kNone, y, choices);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<MaxPoolNode>(out, x, window, std::move(choices));
  return out;
}

Var adaptive_avg_pool2d(Tape& tape, Var x, std::int64_t height, std::int64_t width) {
  check_operand(tape, x, "AdaptiveAvgPool2d");
  return compute(tape, x, AdaptiveAveragePool{height, width});
}

}  // namespace lockstep::nn
