#include "nn/autograd/functions.h"

namespace lockstep::nn {
namespace {

class LinearNode final : public Node {
 public:
  LinearNode(Var output, Var x, Parameter& w, Parameter* b, Epilogue epilogue)
      : Node(output, {&w, b}), x_(x), epilogue_(epilogue) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& w = *parameters()[0];
    Parameter* const b = parameters()[1];
    const Tensor dy = epilogue_ == Epilogue::kRelu ? tape.take_grad_through_relu(output()) : tape.take_grad(output());
    // Weights first: their collective can start while the input's gradient is computed.
    if (b != nullptr && b->requires_grad()) {
      const auto target = b->contribute();
      backend.linear().backward_bias(dy, target.accumulate, target.gradient);
    }
    if (w.requires_grad()) {
      const auto target = w.contribute();
      backend.linear().backward_weight(x_.value(), dy, target.accumulate, target.gradient);
    }
    if (x_.needs_grad()) {
      Tensor dx = backend.empty(x_.shape(), dy.dtype());
      backend.linear().backward_input(dy, w.as(dy.dtype()), dx);
      tape.contribute(x_, std::move(dx));
    }
  }

 private:
  Var x_;
  Epilogue epilogue_;
};

}  // namespace

Var linear(Tape& tape, Var x, Parameter& w, Parameter* b, Epilogue epilogue) {
  const Tape::OpScope scope(tape, "linear", &w);
  if (x.shape().size() != 2 || x.shape()[1] != w.value().size(1))
    throw UsageError(fmt::format("Linear with {} inputs was given {}", w.value().size(1), to_string(x.shape())),
                     "flatten the input, or match the layer's in_features to it");
  const DType dtype = x.value().dtype();
  Tensor y = tape.backend().empty({x.shape()[0], w.value().size(0)}, dtype);
  tape.backend().linear().forward(x.value(), w.as(dtype), b != nullptr ? b->as(dtype) : Tensor(), epilogue, y);
  const bool needs_grad = x.needs_grad() || w.requires_grad() || (b != nullptr && b->requires_grad());
  const Var out = tape.make_var(std::move(y), needs_grad);
  tape.record<LinearNode>(out, x, w, b, epilogue);
  return out;
}

}  // namespace lockstep::nn
