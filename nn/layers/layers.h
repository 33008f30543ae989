// The layers: PyTorch's, with its names, argument meanings and initialisations.
#pragma once

#include "nn/layers/module.h"

namespace lockstep::nn {

/// y = x · wᵀ + b. weight (out, in), bias (out), both uniform in ±1/sqrt(in): what PyTorch's
/// kaiming_uniform(a = sqrt(5)) amounts to.
class Linear final : public Module {
 public:
  Linear(Context& context, std::int64_t in_features, std::int64_t out_features, bool bias = true);
  Var forward(Tape& tape, Var x) override { return forward(tape, x, Epilogue::kNone); }
  /// With the activation that follows fused in.
  Var forward(Tape& tape, Var x, Epilogue epilogue);

 private:
  Parameter& weight_;
  Parameter* bias_;
};

/// weight (out, kernel, kernel, in) in memory and (out, in, kernel, kernel) in files; uniform in ±1/sqrt(fan in).
class Conv2d final : public Module {
 public:
  Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window, bool bias = true);
  Var forward(Tape& tape, Var x) override { return forward(tape, x, Epilogue::kNone); }
  Var forward(Tape& tape, Var x, Epilogue epilogue);
  /// And with the maximum pooling behind that.
  Var forward(Tape& tape, Var x, Epilogue epilogue, const Window& max_pool);

 private:
  Window window_;
  Parameter& weight_;
  Parameter* bias_;
};

class MaxPool2d final : public Module {
 public:
  explicit MaxPool2d(const Window& window) : window_(window) {}
  Var forward(Tape& tape, Var x) override { return pool2d(tape, PoolKind::kMax, x, window_); }
  const Window& window() const { return window_; }

 private:
  Window window_;
};

class AvgPool2d final : public Module {
 public:
  explicit AvgPool2d(const Window& window) : window_(window) {}
  Var forward(Tape& tape, Var x) override { return pool2d(tape, PoolKind::kAverage, x, window_); }

 private:
  Window window_;
};

/// Over the last axis of (N, H, W, C) or (N, C). weight ones, bias zeros, running_mean zeros, running_var ones,
/// num_batches_tracked 0 (i64).
class BatchNorm final : public Module {
 public:
  BatchNorm(Context& context, std::int64_t num_features, double eps = 1e-5, double momentum = 0.1);
  Var forward(Tape& tape, Var x) override;

 private:
  double eps_, momentum_;
  Parameter& weight_;
  Parameter& bias_;
  Tensor& running_mean_;
  Tensor& running_variance_;
  Tensor& num_batches_tracked_;
};

class ReLU final : public Module {
 public:
  Var forward(Tape& tape, Var x) override { return relu(tape, x); }
};

class Flatten final : public Module {
 public:
  Var forward(Tape& tape, Var x) override { return flatten(tape, x); }
};

/// One after the other; children are named "0", "1", …. A ReLU behind a Linear or Conv2d runs inside it, and so does a
/// MaxPool2d behind a Conv2d or its ReLU.
class Sequential final : public Module {
 public:
  Sequential() = default;
  template <class M>
  Sequential& then(std::unique_ptr<M> module) {
    steps_.push_back(&register_module(std::to_string(steps_.size()), std::move(module)));
    return *this;
  }
  Var forward(Tape& tape, Var x) override;

 private:
  std::vector<Module*> steps_;
};

}  // namespace lockstep::nn
