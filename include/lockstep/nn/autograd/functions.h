// Differentiable operators: each computes its result at once and records its backward on the tape.
// Activations are (N, features), (N, T, features) or (N, H, W, C); results have the type of x where nothing else is
// said. Shapes, types and devices that do not fit are UsageErrors. Functions with PyTorch's names compute the same.
//
// The tape keeps what backward reads until it has walked the operator or is reset: pointers to parameters, and handles
// of tensors (tokens, numbers, positions, lengths, states). Their content, and the memory of views (Tape), must not
// change until then. All else is only read during the call.
#pragma once

#include <array>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>

#include "lockstep/nn/autograd/tape.h"
#include "lockstep/nn/autograd/vars.h"
#include "lockstep/nn/ops/loss.h"

namespace lockstep::nn {

/// epilogue(x (…, I) · wᵀ + b), (…, O); w (O, I), b (O) or nullptr. GELU is kTanh.
Var linear(Tape& tape, Var x, Parameter& w, Parameter* b, Epilogue epilogue = Epilogue::kNone);

/// linear() for a model's last layer, whose result a loss reads: its rows lie apart where the device computes faster
/// with that (Backend::pitch_of, Note [Pitch]), and so do those of its gradient.
Var logits(Tape& tape, Var x, Parameter& w, Parameter* b);

/// Which operands of matmul() lie with their last two axes exchanged.
struct Turned {
  bool a = false, b = false;
};
/// a (…, M, K) · b (…, K, N) → (…, M, N), of one type; turned, a is (…, K, M) and b (…, N, K). Leading axes are
/// broadcast as in PyTorch: by copies, but for a b of two axes.
Var matmul(Tape& tape, Var a, Var b, Turned turned = {});

/// A parameter as a value, of the type that the tape's activations have: what is computed with it contributes to its
/// gradient.
Var variable(Tape& tape, Parameter& parameter);

/// x (N, H, W, C), w (O, Kh, Kw, C / groups), b (O) or nullptr → (N, H', W', O). Of `groups`, which divide C and O,
/// each computes its O / groups neighbouring channels from its C / groups; with C groups it is a depthwise convolution.
Var conv2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue = Epilogue::kNone,
           std::int64_t groups = 1);

/// x (N, T, C), w (O, K, C / groups), b (O) or nullptr → (N, T', O).
Var conv1d(Tape& tape, Var x, Parameter& w, Parameter* b, std::int64_t stride = 1, std::int64_t padding = 0,
           std::int64_t groups = 1);
/// x (N, H, W, I), w (I, Kh, Kw, O / groups), b (O) or nullptr → (N, H', W', O) with H' = (H − 1) · stride − 2 ·
/// padding
/// + Kh + output padding, which is below the stride; W' likewise: PyTorch's ConvTranspose2d.
Var conv_transpose2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window,
                     std::array<std::int64_t, 2> output_padding = {0, 0}, std::int64_t groups = 1);

/// pool2d(kMax, conv2d(x, w, b, window, epilogue, groups), pool): the same values. What the convolution computes is
/// never there as a whole, neither in forward nor in backward, for both work through the batch in pieces
/// (Backend::cache_block_bytes). The activation is ReLU, or none.
Var conv2d_max_pool(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue,
                    const Window& pool, std::int64_t groups = 1);

/// x (N, H, W, C) → (N, H', W', C).
Var pool2d(Tape& tape, PoolKind kind, Var x, const Window& window);
/// x (N, H, W, C) → (N, height, width, C), of any extents above 0: PyTorch's AdaptiveAvgPool2d.
Var adaptive_avg_pool2d(Tape& tape, Var x, std::int64_t height, std::int64_t width);
/// Of what pool2d returns for x of this shape; throws what it would.
Shape pooled_shape(const Shape& x, const Window& window);

/// Of a batch_norm() call. The running statistics are (C) f32, and are written to in training.
struct BatchNormState {
  const Tensor& running_mean;
  const Tensor& running_variance;
  double momentum = 0.1;
  double eps = 1e-5;
  std::shared_ptr<StatisticsExchange> exchange = nullptr;  // of the ranks that share a batch
  const Tensor* num_batches_tracked = nullptr;             // () i64, one more after each batch of training; may be none
};
/// Over the last axis, of C features: gamma and beta (C). Training: the batch's statistics, of at least two rows, and
/// the running ones move towards them (NormKernels). Otherwise the running ones. With kRelu: relu(y + residual), where
/// that may be absent, in the same pass; with kRelu6, without a residual, relu6(y); kGelu is not taken. With an
/// exchange, training's statistics are those of all ranks' rows together, of which this one may have none, and forward
/// and backward are collective.
Var batch_norm(Tape& tape, Var x, Parameter& gamma, Parameter& beta, const BatchNormState& state, bool training,
               Epilogue epilogue = Epilogue::kNone, std::optional<Var> residual = std::nullopt);

/// Over the last axis, of C features: gamma and beta (C), beta may be nullptr (LayerNormKernels).
Var layer_norm(Tape& tape, Var x, Parameter& gamma, Parameter* beta, double eps = 1e-5);
struct SumAndNorm {
  Var sum, norm;
};
/// add(x, y) and layer_norm() of that, to the same bits, in one pass over both.
SumAndNorm add_layer_norm(Tape& tape, Var x, Var y, Parameter& gamma, Parameter* beta, double eps = 1e-5);

/// gamma · x / √(mean x² + eps) over the last axis, of C features: gamma (C) (Zhang and Sennrich, 2019).
Var rms_norm(Tape& tape, Var x, Parameter& gamma, double eps = 1e-6);
/// x (N, …, C): each sample's C / groups neighbouring channels have mean 0 and variance 1 together (Wu and He, "Group
/// Normalization", 2018); gamma and beta (C), beta may be nullptr.
Var group_norm(Tape& tape, Var x, std::int64_t groups, Parameter& gamma, Parameter* beta, double eps = 1e-5);

/// NaN stays NaN.
Var relu(Tape& tape, Var x);
/// min(relu(x), 6). NaN stays NaN.
Var relu6(Tape& tape, Var x);
/// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
Var gelu(Tape& tape, Var x, GeluKind kind = GeluKind::kErf);
/// x / (1 + e⁻ˣ) (Elfwing et al., "Sigmoid-Weighted Linear Units", 2018).
Var silu(Tape& tape, Var x);
/// In training: each element is zero with probability p < 1, and the others are divided by 1 - p. `layer` identifies a
/// dropout within its model. What is kept depends on tape.dropout_state() (PointwiseKernels::dropout).
Var dropout(Tape& tape, Var x, double p, std::int64_t layer);

/// A constant of the activations' type: numbers of the standard normal distribution, one for each element of `shape`,
/// whose first axis is that of the samples. They depend on tape.dropout_state() and `layer` as dropout()'s do
/// (PointwiseKernels::normal): not on how samples are shared out among ranks.
Var randn(Tape& tape, const Shape& shape, std::int64_t layer);

/// tokens (…) i32, table (V, C) → (…, C), of the type that the tape's activations have. Numbers outside of [0, V):
/// EmbeddingKernels.
Var embedding(Tape& tape, const Tensor& tokens, Parameter& table);
/// x (N, T, C) + rows [first, first + T) of table (P, C).
Var add_positions(Tape& tape, Var x, Parameter& table, std::int64_t first = 0);
/// The angles of rotary positions: position p turns the features d and d + head_dim / 2 of a head by p · base^(−2d /
/// head_dim). (positions, head_dim / 2) f32 each, on the device. Throws UsageError for an odd head_dim, and for
/// more than kMostBytes. Copies share them.
struct RotaryAngles {
  RotaryAngles(Backend& backend, std::int64_t positions, std::int64_t head_dim, double base = 10000.0);
  static constexpr double kMostBytes = 0x1p30;
  /// What they take, in bytes; a double holds what sizes out of a file may make of it.
  static double bytes(std::int64_t positions, std::int64_t head_dim) {
    return static_cast<double>(positions) * static_cast<double>(head_dim) * sizeof(float);
  }
  Tensor cosines, sines;
};
/// x (N, T, heads · head_dim), of which each head's row t is turned by the angles of position first + t
/// (EmbeddingKernels::rotate).
Var rotary(Tape& tape, Var x, const RotaryAngles& angles, std::int64_t first = 0);
/// qkv (N, T, 3 · C) → (N, T, C) with C / heads features a head (AttentionKernels). The state of dropout is the tape's.
Var attention(Tape& tape, Var qkv, std::int64_t heads, AttentionOptions options = {});
/// The same of queries, keys and values of their own, (N, T, C) each.
Var attention(Tape& tape, Var q, Var k, Var v, std::int64_t heads, AttentionOptions options = {});
inline Var causal_attention(Tape& tape, Var qkv, std::int64_t heads, double drop = 0.0, std::int64_t layer = 0) {
  return attention(tape, qkv, heads, {.dropout = drop, .layer = layer});
}
/// Of a recurrent layer in one direction, as RnnWeights has them; both biases, or none.
struct RnnParameters {
  Parameter& w_ih;
  Parameter& w_hh;
  Parameter* b_ih = nullptr;
  Parameter* b_hh = nullptr;
};
/// x (N, T, I), or (N, T, W, C) whose rows of W · C = I features are the steps → (N, T, H), as RnnKernels says. It
/// begins with `state` and replaces it by the state after the last step, in new memory, as constants: no gradient flows
/// through it. nullptr, or undefined tensors: it begins with zeros. A Segment (recompute()) gives none: it would
/// advance it twice.
Var rnn(Tape& tape, Var x, const RnnParameters& parameters, RnnOptions options = {}, RnnState* state = nullptr);

// Where elements lie. Axes are counted from 0, or from the last one, -1, backwards. What needs no copy makes none:
// reshape(), and permutations that leave the elements in their order.

/// The same elements in another shape; one extent may be -1.
Var reshape(Tape& tape, Var x, const Shape& shape);
/// Axis i of the result is x's axis axes[i].
Var permute(Tape& tape, Var x, std::initializer_list<int> axes);
/// Two axes exchanged.
Var transpose(Tape& tape, Var x, int first, int second);
/// Indices [begin, end) of an axis.
Var slice(Tape& tape, Var x, int axis, std::int64_t begin, std::int64_t end);
/// One after the other along an axis.
Var concat(Tape& tape, const Vars& parts, int axis);
/// Repeated along axes of one index, and along new ones before them.
Var broadcast_to(Tape& tape, Var x, const Shape& shape);
/// y[…, k, …] = x[…, indices[…, k, …], …] along the axis. indices i32, of x's shape but for that axis: EmbeddingKernels
/// says what becomes of those outside of it.
Var gather(Tape& tape, Var x, int axis, const Tensor& indices);
/// x where the condition, i32, is not 0, else y. x and y are broadcast, and then have the condition's shape. A gradient
/// that does not pass is 0.
Var where(Tape& tape, const Tensor& condition, Var x, Var y);
/// Over these axes; none: over all. `keep`: they stay, with one index. max_over()'s gradient is MaxLast's.
Var sum_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep = false);
Var mean_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep = false);
Var max_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep = false);
/// Over an axis: SoftmaxLast, LogSoftmaxLast.
Var softmax(Tape& tape, Var x, int axis = -1);
Var log_softmax(Tape& tape, Var x, int axis = -1);

/// The rows of x (…, C) with these indices (K, …) i32, counted over all axes but the last → (K, …, C).
Var index_select(Tape& tape, Var x, const Tensor& indices);
/// x (N, T, C), positions (N, K) i32, each in [0, T) → (N, K, C): of each sample the rows at its positions.
Var take_positions(Tape& tape, Var x, const Tensor& positions);
/// x (N, T, C) → (N, C): of each sample the row at `position`, in [0, T).
Var take_position(Tape& tape, Var x, std::int64_t position);
/// Broadcast as in PyTorch, from the last axis on.
Var add(Tape& tape, Var x, Var y);
/// relu(add(x, y)) in one pass.
Var add_relu(Tape& tape, Var x, Var y);
/// (N, H, W, C) → (N, C·H·W) in PyTorch's order (channel outermost); (N, T, F) → (N, T·F); (N, F) stays.
Var flatten(Tape& tape, Var x);

// Of each element: computed in f32 and rounded to the type of x. Operands of two are of one type, and are broadcast as
// in PyTorch, from the last axis on.

/// The same numbers as f32.
Var to_f32(Tape& tape, Var x);
/// Of the type that the tape's activations have.
Var to_activations(Tape& tape, Var x);
Var abs(Tape& tape, Var x);
Var exp(Tape& tape, Var x);
Var log(Tape& tape, Var x);
Var sqrt(Tape& tape, Var x);
Var square(Tape& tape, Var x);
Var sin(Tape& tape, Var x);
Var cos(Tape& tape, Var x);
Var tanh(Tape& tape, Var x);
Var sigmoid(Tape& tape, Var x);
/// log(1 + eˣ), also where that is too large to be computed so.
Var softplus(Tape& tape, Var x);
Var sub(Tape& tape, Var x, Var y);
Var mul(Tape& tape, Var x, Var y);
Var div(Tape& tape, Var x, Var y);
Var minimum(Tape& tape, Var x, Var y);
Var maximum(Tape& tape, Var x, Var y);
/// Any operator of lockstep/nn/ops/operators.h, where those below are described, too.
Var apply(Tape& tape, Var x, const Operator& op);
inline Var affine(Tape& tape, Var x, float scale, float shift = 0.0f) { return apply(tape, x, Affine{scale, shift}); }
/// x ^ exponent.
inline Var pow(Tape& tape, Var x, float exponent) { return apply(tape, x, Pow{exponent}); }
/// Each element at least `low` and at most `high`.
inline Var clamp(Tape& tape, Var x, float low, float high) { return apply(tape, x, Clamp{low, high}); }
inline Var sum_last(Tape& tape, Var x) { return apply(tape, x, SumLast()); }
inline Var spread_last(Tape& tape, Var x, std::int64_t count) { return apply(tape, x, SpreadLast{count}); }

/// A loss summed over the local samples. `value.value()` is `totals`: (2) f32 on the device, the sum and the number of
/// correct predictions (0 for squared error). Its gradient is that of scale · sum. Valid as its Var is; a copy of
/// totals() stays.
struct Loss {
  Var value;
  /// The second is NaN where nothing is counted: sum(). Of a sum of two losses of which one counts it is that one's.
  const Tensor& totals() const { return value.value(); }
};
/// outputs (…, K), logits; targets (…) i32, labels in [0, K), or (…, K) f32, probabilities (LossKernels).
/// PyTorch's CrossEntropyLoss is scale = 1 / rows, without those that rule.ignored leaves out, of labels alone. A scale
/// that is not finite is a UsageError, here and below.
Loss cross_entropy(Tape& tape, Var outputs, const Tensor& targets, float scale, const TargetRule& rule = 0.0f);
/// The sum of all elements of x as a loss.
///
/// Note [Own losses]
/// A custom loss computes, with the functions above, a number for each sample, or for each target, and returns
/// sum() of them:
///
///   Loss huber(Tape& tape, Var y, const Tensor& targets, float scale) {
///     const Var d = square(tape, sub(tape, y, tape.input(targets)));
///     return sum(tape, affine(tape, sqrt(tape, affine(tape, d, 1, 1)), 1, -1), scale);
///   }
Loss sum(Tape& tape, Var x, float scale);
/// x and target of one shape. PyTorch's MSELoss is scale = 1 / count.
Loss squared_error(Tape& tape, Var x, const Tensor& target, float scale);

/// A loss of a model's outputs, against the targets that the data have for them. `scale` is 1 / targets of the global
/// batch: what a summed loss is multiplied with for its gradient to be the mean's. A function of one output takes a Var
/// in place of Vars. It sees the samples of one rank, one device of a DataParallel and one part of an accumulated step
/// alone, so a loss that compares samples with each other depends on how they are shared out. It is called with empty
/// batches too; on a device whose tensors have shapes and no values, to find out what memory it takes; and by
/// DataParallel on several threads at once. `targets` is there during the call: Tape::input() keeps a handle. What it
/// throws comes out of Module::forward_loss(), after which the tape is reset.
using LossFunction = std::function<Loss(Tape& tape, const Vars& outputs, const Tensor& targets, float scale)>;

/// A part of a pass: what it computes from its inputs. It runs again in backward, to the same bits, so it depends on
/// nothing else that changes in between, such as an RnnState that it advances. The tape keeps it, and whatever it
/// refers to is there, until backward has walked it or the tape is reset. What it throws comes out of recompute(), or
/// of Tape::backward().
using Segment = std::function<Vars(Tape&, const Vars&)>;

/// Note [Recomputation]
/// segment(tape, inputs), of which the tape keeps the inputs and the results alone (torch.utils.checkpoint; Chen et
/// al., "Training deep nets with sublinear memory cost", 2016). When backward comes to it, the segment is recorded
/// again, and walked then: values and gradients are the same bits as without, for one more forward pass of the segment.
///
/// - Running statistics move in the first pass alone; dropout drops the same elements in both, of the tape's state.
/// - A loss that is returned is a value like others, which backward() does not start from: losses come after it.
/// - Values that the segment has made but not returned are gone after it, as those of a pass that was walked.
/// - A parameter of the segment is not ready before backward has walked all segments and operators that use it. One
///   that is gone by then is a UsageError, as is another number of values than the first time.
/// - Segments may be in segments. On a tape that does not record it is the segment's own call.
Vars recompute(Tape& tape, const Vars& inputs, Segment segment);

}  // namespace lockstep::nn
