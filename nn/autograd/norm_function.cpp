#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

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

class BatchNormNode : public Node {
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
    const Tensor dy = tape.take_grad(output());
    Tensor dx = dy.is_sole_owner() ? dy : backend.empty(x_.shape(), dy.dtype());
    deliver_gradients(tape, [&](const Tensor& dgamma, const Tensor& dbeta) {
      backend.norm().backward(x_.value(), dy, parameters()[0]->value(), mean_, variance_, given_statistics_, eps_, dx,
                              dgamma, dbeta);
    });
    tape.contribute(x_, std::move(dx));
  }

 protected:
  // Memory for a gradient to overwrite: the parameter's own, or a temporary if the gradient is added or not wanted.
  struct Delivery {
    Delivery(Backend& backend, Parameter& parameter) {
      if (parameter.requires_grad()) {
        const auto target = parameter.contribute();
        (target.accumulate ? sum : gradient) = target.gradient;
      }
      if (gradient.defined()) return;
      gradient = backend.empty(parameter.value().shape());
    }
    void finish(Backend& backend) const {
      if (sum.defined()) backend.pointwise().add_to(gradient, 1.0f, sum);
    }
    Tensor gradient, sum;
  };

  // compute(dgamma, dbeta) overwrites them.
  template <class Compute>
  void deliver_gradients(Tape& tape, const Compute& compute) {
    Backend& backend = tape.backend();
    Parameter& gamma = *parameters()[0];
    Parameter& beta = *parameters()[1];
    const Delivery dgamma(backend, gamma), dbeta(backend, beta);
    compute(dgamma.gradient, dbeta.gradient);
    dgamma.finish(backend);
    dbeta.finish(backend);
  }

  Var x_;
  Tensor mean_, variance_;
  bool given_statistics_;
  double eps_;
};

// In training, with the ReLU or ReLU6 that follows, and what is added before it.
class BatchNormReluNode final : public BatchNormNode {
 public:
  BatchNormReluNode(Var output, Var x, Epilogue activation, std::optional<Var> residual, Parameter& gamma,
                    Parameter& beta, Tensor mean, Tensor variance, double eps)
      : BatchNormNode(output, x, gamma, beta, std::move(mean), std::move(variance), false, eps),
        activation_(activation),
        residual_(residual) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Tensor dy, more;
    std::tie(dy, more) = tape.take_grad_parts(output());
    if (!dy.is_sole_owner() && more.is_sole_owner()) std::swap(dy, more);
    if (!dy.is_sole_owner()) {
      const Tensor shared = std::exchange(dy, backend.empty(dy.shape(), dy.dtype()));
      backend.pointwise().copy(shared, dy);
    }
    const bool apart = residual_ && residual_->needs_grad();
    Tensor dx = apart ? backend.empty(x_.shape(), dy.dtype()) : dy;
    deliver_gradients(tape, [&](const Tensor& dgamma, const Tensor& dbeta) {
      const Tensor &gamma = parameters()[0]->value(), &beta = parameters()[1]->value();
      if (more.defined())
        backend.norm().backward_relu_added(x_.value(), output().value(), dy, more, gamma, mean_, variance_, eps_, dx,
                                           dgamma, dbeta);
      else
        backend.norm().backward_relu(x_.value(), output().value(), activation_, residual_.has_value(), dy, gamma, beta,
                                     mean_, variance_, eps_, dx, dgamma, dbeta);
    });
    tape.contribute(x_, std::move(dx));
    if (apart) tape.contribute(*residual_, std::move(dy));
  }

 private:
  Epilogue activation_;
  std::optional<Var> residual_;
};

class SyncBatchNormNode final : public Node {
 public:
  SyncBatchNormNode(Var output, Var x, Parameter& gamma, Parameter& beta, Tensor mean, Tensor variance, Tensor rows,
                    std::shared_ptr<StatisticsExchange> exchange, double eps)
      : Node(output, {&gamma, &beta}),
        x_(x),
        mean_(std::move(mean)),
        variance_(std::move(variance)),
        rows_(std::move(rows)),
        exchange_(std::move(exchange)),
        eps_(eps) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& gamma = *parameters()[0];
    Parameter& beta = *parameters()[1];
    const std::int64_t channels = mean_.count();
    const Tensor& dy = tape.grad(output());
    const Tensor sums = backend.empty({2 * channels});
    backend.norm().backward_sums(x_.value(), dy, mean_, variance_, eps_, sums);
    // The parameters' gradients are this rank's share: whoever sums gradients over the ranks sums these too.
    if (gamma.requires_grad()) deliver(backend, gamma, sums.slice(0, channels));
    if (beta.requires_grad()) deliver(backend, beta, sums.slice(channels, 2 * channels));
    if (!x_.needs_grad()) return;
    Tensor dx = backend.empty(x_.shape(), dy.dtype());
    backend.norm().backward_input(x_.value(), dy, gamma.value(), mean_, variance_, rows_, exchange_->sum(sums), eps_,
                                  dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Tensor mean_, variance_, rows_;
  std::shared_ptr<StatisticsExchange> exchange_;
  double eps_;
};

Var sync_batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state) {
  const Tape::OpScope scope(tape, "batch_norm", &gamma);
  Backend& backend = tape.backend();
  const std::int64_t channels = gamma.value().count();
  Tensor y = backend.empty(x.shape(), x.value().dtype());
  Tensor mean = backend.empty({channels}), variance = backend.empty({channels}), rows = backend.empty({1});
  const Tensor part = backend.empty({2 * channels + 1});
  backend.norm().moments(x.value(), part);
  backend.norm().join_moments(state.exchange->gather(part), tape.recomputing() ? 0.0 : state.momentum, mean, variance,
                              rows, state.running_mean, state.running_variance);
  backend.norm().forward_infer(x.value(), gamma.value(), beta.value(), mean, variance, state.eps, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad() || gamma.requires_grad() || beta.requires_grad());
  tape.record<SyncBatchNormNode>(out, x, gamma, beta, std::move(mean), std::move(variance), std::move(rows),
                                 state.exchange, state.eps);
  return out;
}

// With the running statistics.
Var frozen_batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state) {
  const Tape::OpScope scope(tape, "batch_norm", &gamma);
  Tensor y = tape.backend().empty(x.shape(), x.value().dtype());
  tape.backend().norm().forward_infer(x.value(), gamma.value(), beta.value(), state.running_mean,
                                      state.running_variance, state.eps, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad() || gamma.requires_grad() || beta.requires_grad());
  tape.record<BatchNormNode>(out, x, gamma, beta, state.running_mean, state.running_variance, true, state.eps);
  return out;
}

// What follows the norm, where it is an operation of its own.
Var finished(Tape& tape, Var y, Epilogue epilogue, std::optional<Var> residual) {
  return residual ? add_relu(tape, y, *residual) : activated(tape, y, epilogue);
}

void count_batch(Tape& tape, const BatchNormState& state) {
  if (state.num_batches_tracked != nullptr && !tape.recomputing())
    tape.backend().pointwise().increment(*state.num_batches_tracked);
}

}  // namespace

Var activated(Tape& tape, Var x, Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kRelu: return relu(tape, x);
    case Epilogue::kRelu6: return relu6(tape, x);
    default: return x;
  }
}

Var batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state, bool training,
               Epilogue epilogue, std::optional<Var> residual) {
  check_operand(tape, x, "BatchNorm");
  if (residual) check_operand(tape, *residual, "BatchNorm");
  check_parameter(tape, gamma, "BatchNorm");
  check_usage(epilogue != Epilogue::kGelu && (!residual || epilogue == Epilogue::kRelu),
              "a batch normalisation with another activation inside than ReLU or, of nothing added, ReLU6",
              "apply it to what it returns");
  const std::int64_t channels = gamma.value().count();
  if (channels < 1 || x.shape().size() < 2 || x.shape()[x.shape().size() - 1] != channels)
    throw UsageError(fmt::format("BatchNorm over {} channels was given {}", channels, to_string(x.shape())),
                     "match num_features to the last axis of the input");
  check_further(tape, &beta, {channels}, "a bias", "BatchNorm");
  for (const Tensor* const running : {&state.running_mean, &state.running_variance}) {
    check_tensor(tape, *running, DType::kF32, "BatchNorm was given running statistics");
    if (running->shape() != Shape{channels}) refuse_shape(*running, {channels}, "running statistics", "BatchNorm");
  }
  if (residual && (residual->shape() != x.shape() || residual->value().dtype() != x.value().dtype()))
    throw UsageError(fmt::format("add of {} and {}", to_string(x.shape()), to_string(residual->shape())),
                     "give both the same shape");
  if (training && state.exchange != nullptr) {
    const Var y = finished(tape, sync_batch_norm(tape, x, gamma, beta, state), epilogue, residual);
    count_batch(tape, state);
    return y;
  }
  if (!training) return finished(tape, frozen_batch_norm(tape, x, gamma, beta, state), epilogue, residual);
  const Tape::OpScope scope(tape, "batch_norm", &gamma);
  Backend& backend = tape.backend();
  Tensor y = backend.empty(x.shape(), x.value().dtype());
  const std::int64_t rows = x.value().count() / channels;
  if (rows < 2)
    throw UsageError(fmt::format("BatchNorm cannot train on {}: it needs two values per channel", to_string(x.shape())),
                     "use a larger batch, or evaluation mode");
  Tensor mean = backend.empty({channels}), variance = backend.empty({channels});
  NormKernels& kernels = backend.norm();
  NormKernels::Running running = {state.running_mean, state.running_variance, state.momentum};
  if (tape.recomputing())
    running.momentum = 0.0;
  else if (kernels.counts_batches())
    running.batches = state.num_batches_tracked;
  kernels.forward_train_moving(x.value(), gamma.value(), beta.value(), state.eps, epilogue,
                               residual ? residual->value() : Tensor(), running, y, mean, variance);
  if (!kernels.counts_batches()) count_batch(tape, state);
  const Var out = tape.make_var(std::move(y), x.needs_grad() || gamma.requires_grad() || beta.requires_grad() ||
                                                  (residual && residual->needs_grad()));
  if (epilogue != Epilogue::kNone) {
    if (residual && kernels.adds_gradients()) tape.keep_grad_parts(out);
    tape.record<BatchNormReluNode>(out, x, epilogue, residual, gamma, beta, std::move(mean), std::move(variance),
                                   state.eps);
  } else {
    tape.record<BatchNormNode>(out, x, gamma, beta, std::move(mean), std::move(variance), false, state.eps);
  }
  return out;
}

namespace {

void check_channels(const Parameter& gamma, Var x, const char* op) {
  const int last = x.shape().size() - 1;
  if (last < 0 || gamma.value().shape() != Shape{x.shape()[last]})
    throw UsageError(
        fmt::format("{} with a weight of {} was given {}", op, to_string(gamma.value().shape()), to_string(x.shape())),
        "the weight has as many numbers as the input's last axis");
}

// x · gamma + beta along the last axis, all in f32.
Var scaled(Tape& tape, Var x, Parameter& gamma, Parameter* beta) {
  const Var y = mul(tape, x, variable(tape, gamma, DType::kF32));
  return beta != nullptr ? add(tape, y, variable(tape, *beta, DType::kF32)) : y;
}

}  // namespace

Var rms_norm(Tape& tape, Var x, Parameter& gamma, double eps) {
  check_operand(tape, x, "RMSNorm");
  check_parameter(tape, gamma, "RMSNorm");
  check_channels(gamma, x, "RMSNorm");
  const NormalizeLast normalize = {.eps = static_cast<float>(eps), .centered = false};
  return in_f32(tape, x, [&](Var wide) { return scaled(tape, apply(tape, wide, normalize), gamma, nullptr); });
}

Var group_norm(Tape& tape, Var x, std::int64_t groups, Parameter& gamma, Parameter* beta, double eps) {
  check_operand(tape, x, "GroupNorm");
  check_parameter(tape, gamma, "GroupNorm");
  check_channels(gamma, x, "GroupNorm");
  check_further(tape, beta, gamma.value().shape(), "a bias", "GroupNorm");
  const Shape& s = x.shape();
  const std::int64_t channels = gamma.value().count();
  if (s.size() < 2 || groups < 1 || channels < 1 || channels % groups != 0)
    throw UsageError(fmt::format("GroupNorm of {} groups was given {}", groups, to_string(s)),
                     "it takes (N, …, C) with C a multiple of the groups");
  const std::int64_t each = channels / groups;
  std::int64_t places = 1;
  for (int axis = 1; axis < s.size() - 1; ++axis) places *= s[axis];
  return in_f32(tape, x, [&](Var wide) {
    const Var by_group = permute(tape, reshape(tape, wide, {s[0], places, groups, each}), {0, 2, 1, 3});
    const Var y = apply(tape, reshape(tape, by_group, {s[0], groups, places * each}),
                        NormalizeLast{.eps = static_cast<float>(eps), .centered = true});
    const Var back = permute(tape, reshape(tape, y, {s[0], groups, places, each}), {0, 2, 1, 3});
    return scaled(tape, reshape(tape, back, s), gamma, beta);
  });
}

}  // namespace lockstep::nn
