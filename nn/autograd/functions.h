// Differentiable operators: each computes its result at once and records its backward on the tape.
// Activations are (N, features) or (N, H, W, C). Shapes that do not fit are UsageErrors.
#pragma once

#include "nn/autograd/tape.h"

namespace lockstep::nn {

/// epilogue(x (N, I) · wᵀ + b); w (O, I), b (O) or nullptr.
Var linear(Tape& tape, Var x, Parameter& w, Parameter* b, Epilogue epilogue = Epilogue::kNone);

/// x (N, H, W, C), w (O, Kh, Kw, C), b (O) or nullptr → (N, H', W', O).
Var conv2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue = Epilogue::kNone);

/// pool2d(kMax, conv2d(x, w, b, window, epilogue), pool): the same values. What the convolution computes is never there
/// as a whole, neither in forward nor in backward, for both work through the batch in pieces (Backend::piece_bytes).
Var conv2d_max_pool(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue,
                    const Window& pool);

/// x (N, H, W, C) → (N, H', W', C).
Var pool2d(Tape& tape, PoolKind kind, Var x, const Window& window);
/// Of what pool2d returns for x of this shape; throws what it would.
Shape pooled_shape(const Shape& x, const Window& window);

struct BatchNormState {
  const Tensor& running_mean;
  const Tensor& running_variance;
  double momentum = 0.1;
  double eps = 1e-5;
};
/// Over the last axis. Training: the batch's statistics, and the running ones move towards them. Otherwise the
/// running ones.
Var batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state, bool training);

Var relu(Tape& tape, Var x);
/// Same shapes.
Var add(Tape& tape, Var x, Var y);
/// (N, H, W, C) → (N, C·H·W) in PyTorch's order (channel outermost); (N, F) stays.
Var flatten(Tape& tape, Var x);

/// A loss summed over the local samples. `value.value()` is `totals`: (2) f32, the sum and the number of correct
/// predictions (0 for squared error). Its gradient is that of scale · sum.
struct Loss {
  Var value;
  const Tensor& totals() const { return value.value(); }
};
/// logits (N, K); labels (N) i32 in [0, K). PyTorch's CrossEntropyLoss is scale = 1 / N.
Loss cross_entropy(Tape& tape, Var logits, const Tensor& labels, float scale);
/// x and target of one shape. PyTorch's MSELoss is scale = 1 / count.
Loss squared_error(Tape& tape, Var x, const Tensor& target, float scale);

}  // namespace lockstep::nn
