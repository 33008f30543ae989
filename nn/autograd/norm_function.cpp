#include "nn/autograd/functions.h"

namespace lockstep::nn {
namespace {

// Puts a freshly computed gradient where the parameter wants it.
void deliver(Backend& backend, Parameter& parameter, const Tensor& gradient) {
  const auto target = parameter.contribute();
  if (target.accumulate)
    backend.pointwise().add_to(gradient, 1.0f, target.gradient);
  else
    backend.pointwise().copy(gradient, target.gradient);
}

class BatchNormNode final : public Node {
 public:
  BatchNormNode(Var output, Var x, Parameter& gamma, Parameter& beta, Tensor mean, Tensor variance,
                bool given_statistics, double eps)
      : Node(output, {&gamma, &beta}),
        x_(x),
        mean_(std::move(mean)),
        variance_(std::move(variance)),
        given_statistics_(given_statistics),
        eps_(eps) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& gamma = *parameters()[0];
    Parameter& beta = *parameters()[1];
    const Tensor& dy = tape.grad(output());
    Tensor dx = backend.empty(x_.shape(), dy.dtype());
    const Tensor dgamma = backend.empty(gamma.value().shape()), dbeta = backend.empty(beta.value().shape());
    backend.norm().backward(x_.value(), dy, gamma.value(), mean_, variance_, given_statistics_, eps_, dx, dgamma,
                            dbeta);
    if (gamma.requires_grad()) deliver(backend, gamma, dgamma);
    if (beta.requires_grad()) deliver(backend, beta, dbeta);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Tensor mean_, variance_;
  bool given_statistics_;
  double eps_;
};

}  // namespace

Var batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state, bool training) {
  const Tape::OpScope scope(tape, "batch_norm", &gamma);
  const std::int64_t channels = gamma.value().count();
  if (x.shape().size() < 2 || x.shape()[x.shape().size() - 1] != channels)
    throw UsageError(fmt::format("BatchNorm over {} channels was given {}", channels, to_string(x.shape())),
                     "match num_features to the last axis of the input");
  Backend& backend = tape.backend();
  Tensor y = backend.empty(x.shape(), x.value().dtype());
  Tensor mean = state.running_mean, variance = state.running_variance;
  if (training) {
    const std::int64_t rows = x.value().count() / channels;
    if (rows < 2)
      throw UsageError(fmt::format("BatchNorm cannot train on {}: it needs two values a channel", to_string(x.shape())),
                       "use a larger batch, or evaluation mode");
    mean = backend.empty({channels});
    variance = backend.empty({channels});
    backend.norm().forward_train(x.value(), gamma.value(), beta.value(), state.eps, y, mean, variance);
    backend.norm().update_running(mean, variance, rows, state.momentum, state.running_mean, state.running_variance);
  } else {
    backend.norm().forward_infer(x.value(), gamma.value(), beta.value(), mean, variance, state.eps, y);
  }
  const Var out = tape.make_var(std::move(y), x.needs_grad() || gamma.requires_grad() || beta.requires_grad());
  tape.record<BatchNormNode>(out, x, gamma, beta, std::move(mean), std::move(variance), !training, state.eps);
  return out;
}

}  // namespace lockstep::nn
