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
      tape.parameters_done(*this);
      Tensor dx = backend.empty(x_.shape(), dy.dtype());
      if (x_.relu_mask().defined()) {
        backend.linear().backward_input_masked(dy, w.as(dy.dtype()), x_.relu_mask(), dx);
        tape.contribute_masked(x_, std::move(dx));
      } else {
        backend.linear().backward_input(dy, w.as(dy.dtype()), dx);
        tape.contribute(x_, std::move(dx));
      }
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
  LinearKernels& kernels = tape.backend().linear();
  const DType dtype = x.value().dtype();
  const std::int64_t samples = x.shape()[0], outputs = w.value().size(0);
  const bool needs_grad = x.needs_grad() || w.requires_grad() || (b != nullptr && b->requires_grad());
  Tensor y = tape.backend().empty({samples, outputs}, dtype), mask;
  const Tensor bias = b != nullptr ? b->as(dtype) : Tensor();
  if (epilogue == Epilogue::kRelu && needs_grad && tape.recording())
    if (const Shape shape = kernels.mask_shape(samples, outputs); shape.count() > 0)
      mask = tape.backend().empty(shape, DType::kU8);
  if (mask.defined())
    kernels.forward_masked(x.value(), w.as(dtype), bias, y, mask);
  else
    kernels.forward(x.value(), w.as(dtype), bias, epilogue, y);
  const Var out = tape.make_var(std::move(y), needs_grad);
  tape.set_relu_mask(out, std::move(mask));
  tape.record<LinearNode>(out, x, w, b, epilogue);
  return out;
}

}  // namespace lockstep::nn
