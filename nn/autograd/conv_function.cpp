#include "nn/autograd/functions.h"

namespace lockstep::nn {
namespace {

class ConvNode final : public Node {
 public:
  ConvNode(Var output, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue)
      : Node(output, {&w, b}), x_(x), window_(window), epilogue_(epilogue) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& w = *parameters()[0];
    Parameter* const b = parameters()[1];
    const Tensor dy = epilogue_ == Epilogue::kRelu ? tape.take_grad_through_relu(output()) : tape.take_grad(output());
    if (w.requires_grad()) {
      const auto dw = w.contribute();
      if (b != nullptr && b->requires_grad()) {
        const auto db = b->contribute();
        backend.conv().backward_weight(x_.value(), dy, window_, dw.accumulate, dw.gradient, db.accumulate, db.gradient);
      } else {
        backend.conv().backward_weight(x_.value(), dy, window_, dw.accumulate, dw.gradient, false, Tensor());
      }
    } else if (b != nullptr && b->requires_grad()) {
      const auto db = b->contribute();
      const std::int64_t channels = dy.size(3);
      backend.linear().backward_bias(dy.reshaped({dy.count() / channels, channels}), db.accumulate, db.gradient);
    }
    if (x_.needs_grad()) {
      Tensor dx = backend.empty(x_.shape());
      backend.conv().backward_input(dy, w.value(), w.version(), window_, dx);
      tape.contribute(x_, std::move(dx));
    }
  }

 private:
  Var x_;
  Window window_;
  Epilogue epilogue_;
};

}  // namespace

Var conv2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue) {
  const Tape::OpScope scope(tape, "conv2d", &w);
  if (x.shape().size() != 4 || x.shape()[3] != w.value().size(3))
    throw UsageError(fmt::format("Conv2d with {} input channels was given {}", w.value().size(3), to_string(x.shape())),
                     "images are (N, H, W, C); match the layer's in_channels to them");
  LOCKSTEP_ASSERT(w.value().size(1) == window.kernel[0] && w.value().size(2) == window.kernel[1],
                  "weight {}, window {}x{}", to_string(w.value().shape()), window.kernel[0], window.kernel[1]);
  Tensor y = tape.backend().empty(
      {x.shape()[0], window.output_extent(0, x.shape()[1]), window.output_extent(1, x.shape()[2]), w.value().size(0)});
  tape.backend().conv().forward(x.value(), w.value(), w.version(), b != nullptr ? b->value() : Tensor(), window,
                                epilogue, y);
  const bool needs_grad = x.needs_grad() || w.requires_grad() || (b != nullptr && b->requires_grad());
  const Var out = tape.make_var(std::move(y), needs_grad);
  tape.record<ConvNode>(out, x, w, b, window, epilogue);
  return out;
}

}  // namespace lockstep::nn
