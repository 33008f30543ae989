#include <algorithm>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn {
namespace {

// Weights (O, K, C) are those of images of height 1.
Tensor as_images_weight(const Tensor& w) {
  return w.shape().size() == 3 ? w.reshaped({w.size(0), 1, w.size(1), w.size(2)}) : w;
}

bool wants_grad(const Parameter* parameter) { return parameter != nullptr && parameter->requires_grad(); }

// Where the gradients of one convolution's parameters go in one backward pass. Samples may come in several parts.
class ConvGradients {
 public:
  ConvGradients(Backend& backend, Parameter& w, Parameter* b, const Window& window)
      : backend_(backend), w_(w), b_(b), window_(window) {
    if (wants_grad(&w)) w_accumulates_ = w.contribute().accumulate;
    if (wants_grad(b)) b_accumulates_ = b->contribute().accumulate;
  }

  /// x (n, H, W, C), dy (n, H', W', O).
  void add(const Tensor& x, const Tensor& dy) {
    const Tensor db = wants_grad(b_) ? b_->gradient() : Tensor();
    if (wants_grad(&w_)) {
      backend_.conv().backward_weight(x, dy, window_, w_accumulates_, as_images_weight(w_.gradient()), b_accumulates_,
                                      db);
    } else if (db.defined()) {
      const std::int64_t channels = dy.size(3);
      backend_.linear().backward_bias(dy.reshaped({dy.count() / channels, channels}), b_accumulates_, db);
    }
    w_accumulates_ = b_accumulates_ = true;
  }

 private:
  Backend& backend_;
  Parameter& w_;
  Parameter* b_;
  const Window& window_;
  bool w_accumulates_ = false, b_accumulates_ = false;
};

class ConvNode final : public Node {
 public:
  ConvNode(Var output, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue)
      : Node(output, {&w, b}), x_(x), window_(window), epilogue_(epilogue) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& w = *parameters()[0];
    const Tensor dy =
        epilogue_ != Epilogue::kNone ? tape.take_grad_through(output(), epilogue_) : tape.take_grad(output());
    ConvGradients(backend, w, parameters()[1], window_).add(x_.value(), dy);
    if (!x_.needs_grad()) return;
    tape.parameters_done(*this);
    Tensor dx = backend.empty(x_.shape(), dy.dtype());
    backend.conv().backward_input(dy, as_images_weight(w.as(dy.dtype())), w.version(), window_, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Window window_;
  Epilogue epilogue_;
};

// How many of `samples` go into a piece when each has `bytes`: pieces of nearly one size, at least one of them.
std::int64_t samples_of_piece(const Backend& backend, std::int64_t samples, std::size_t bytes) {
  if (samples == 0) return 1;
  const auto most = static_cast<std::int64_t>(
      std::max<std::size_t>(1, backend.cache_block_bytes() / std::max<std::size_t>(1, bytes)));
  const std::int64_t pieces = (samples + most - 1) / most;
  return (samples + pieces - 1) / pieces;
}

class ConvMaxPoolNode final : public Node {
 public:
  ConvMaxPoolNode(Var output, Var x, Parameter& w, Parameter* b, const Window& window, const Window& pool,
                  const Shape& piece, Tensor choices)
      : Node(output, {&w, b}), x_(x), window_(window), pool_(pool), piece_(piece), choices_(std::move(choices)) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter& w = *parameters()[0];
    const Tensor dy = tape.take_grad(output());
    const Tensor dx = x_.needs_grad() ? backend.empty(x_.shape(), dy.dtype()) : Tensor();
    const Tensor between = backend.empty(piece_, dy.dtype());
    ConvGradients gradients(backend, w, parameters()[1], window_);
    const std::int64_t samples = dy.size(0);
    for (std::int64_t begin = 0; begin == 0 || begin < samples; begin += piece_[0]) {
      const std::int64_t end = std::min(samples, begin + piece_[0]);
      const Tensor part = between.slice(0, end - begin);
      backend.pool().max_backward(dy.slice(begin, end), choices_.slice(begin, end), pool_, part);
      gradients.add(x_.value().slice(begin, end), part);
      if (dx.defined())
        backend.conv().backward_input(part, w.as(dy.dtype()), w.version(), window_, dx.slice(begin, end));
    }
    if (dx.defined()) tape.contribute(x_, dx);
  }

 private:
  Var x_;
  Window window_, pool_;
  Shape piece_;     // of what lies between convolution and pooling
  Tensor choices_;  // the ReLU's too
};

void check_window(const Tensor& w, const Window& window) {
  if (w.size(1) != window.kernel[0] || w.size(2) != window.kernel[1])
    throw UsageError(fmt::format("a convolution's weight is {}, and its window {}x{}", to_string(w.shape()),
                                 window.kernel[0], window.kernel[1]),
                     "give the weight (O, Kh, Kw, C) the window's height and width");
}

// " in 4 groups", of errors; nothing for one.
std::string in_groups(std::int64_t groups) { return groups == 1 ? "" : fmt::format(" in {} groups", groups); }

Shape convolved_shape(Var x, const Tensor& w, const Window& window, std::int64_t groups) {
  const bool images = x.shape().size() == 4 && w.shape().size() == 4;
  if (images) valid_groups(x.shape()[3], w.size(0), groups, "Conv2d");
  if (!images || x.shape()[3] != groups * w.size(3))
    throw UsageError(
        fmt::format("Conv2d with a weight of {}{} was given {}", to_string(w.shape()), in_groups(groups),
                    to_string(x.shape())),
        fmt::format("images are (N, H, W, C) with C in_channels, {}", groups * w.size(w.shape().size() - 1)));
  check_window(w, window);
  return {x.shape()[0], window.output_extent(0, x.shape()[1]), window.output_extent(1, x.shape()[2]), w.size(0)};
}

bool needs_grad(Var x, const Parameter& w, const Parameter* b) {
  return x.needs_grad() || wants_grad(&w) || wants_grad(b);
}

void check(const Tape& tape, Var x, const Parameter& w, const Parameter* b, Epilogue epilogue) {
  check_operand(tape, x, "Conv2d");
  check_parameter(tape, w, "Conv2d");
  check_further(tape, b, {w.value().size(0)}, "a bias", "Conv2d");
  check_usage(epilogue != Epilogue::kGelu, "a GELU inside of a convolution, which has none",
              "apply nn::gelu() to what it returns");
}

}  // namespace

std::int64_t valid_groups(std::int64_t in, std::int64_t out, std::int64_t groups, const char* op) {
  if (groups >= 1 && in % groups == 0 && out % groups == 0) return groups;
  throw UsageError(fmt::format("{} of {} to {} channels in {} groups", op, in, out, groups),
                   "the number of groups divides both numbers of channels");
}

std::int64_t Window::output_extent(int axis, std::int64_t in) const {
  const auto a = static_cast<std::size_t>(axis);
  check_usage(kernel[a] >= 1 && stride[a] >= 1 && padding[a] >= 0,
              "a window with a kernel or stride below 1, or a negative padding",
              "give kernels and strides of at least 1, and paddings of at least 0");
  const std::int64_t room = in + 2 * padding[a] - kernel[a];
  if (room < 0)
    throw UsageError(fmt::format("a window of {}x{} does not fit an input of {} with padding {}", kernel[0], kernel[1],
                                 in, padding[a]),
                     "use a larger input or a smaller window");
  return room / stride[a] + 1;
}

Var conv2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue,
           std::int64_t groups) {
  check(tape, x, w, b, epilogue);
  const Tape::OpScope scope(tape, "conv2d", &w);
  const DType dtype = x.value().dtype();
  Tensor y = tape.backend().empty(convolved_shape(x, as_images_weight(w.value()), window, groups), dtype);
  const bool relu6_after = epilogue == Epilogue::kRelu6;  // which no device's convolution has inside
  tape.backend().conv().forward(x.value(), as_images_weight(w.as(dtype)), w.version(),
                                b != nullptr ? b->as(dtype) : Tensor(), window,
                                relu6_after ? Epilogue::kNone : epilogue, y);
  if (relu6_after) tape.backend().pointwise().unary(UnaryOp::kRelu6, y, y);
  const Var out = tape.make_var(std::move(y), needs_grad(x, w, b));
  tape.record<ConvNode>(out, x, w, b, window, epilogue);
  return out;
}

Var conv2d_max_pool(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window, Epilogue epilogue,
                    const Window& pool, std::int64_t groups) {
  check(tape, x, w, b, epilogue);
  check_usage(epilogue != Epilogue::kRelu6, "a ReLU6 between a convolution and its pooling",
              "call conv2d() and pool2d()");
  const Tape::OpScope scope(tape, "conv2d+max_pool2d", &w);
  Backend& backend = tape.backend();
  Shape piece = convolved_shape(x, w.value(), window, groups);
  const std::int64_t samples = piece[0];
  const DType dtype = x.value().dtype();
  Tensor y = backend.empty(pooled_shape(piece, pool), dtype);
  piece[0] = 1;
  piece[0] = samples_of_piece(backend, samples, static_cast<std::size_t>(piece.count()) * size_of(dtype));
  const bool wanted = tape.recording() && needs_grad(x, w, b);
  const Tensor choices = wanted ? backend.empty(y.shape(), PoolKernels::choice_type(pool)) : Tensor();
  {
    const Tensor between = backend.empty(piece, dtype);
    for (std::int64_t begin = 0; begin < samples; begin += piece[0]) {
      const std::int64_t end = std::min(samples, begin + piece[0]);
      const Tensor part = between.slice(0, end - begin);
      backend.conv().forward(x.value().slice(begin, end), w.as(dtype), w.version(),
                             b != nullptr ? b->as(dtype) : Tensor(), window, Epilogue::kNone, part);
      backend.pool().max_forward(part, pool, epilogue, y.slice(begin, end),
                                 wanted ? choices.slice(begin, end) : Tensor());
    }
  }
  const Var out = tape.make_var(std::move(y), needs_grad(x, w, b));
  tape.record<ConvMaxPoolNode>(out, x, w, b, window, pool, piece, choices);
  return out;
}

Var conv1d(Tape& tape, Var x, Parameter& w, Parameter* b, std::int64_t stride, std::int64_t padding,
           std::int64_t groups) {
  check_operand(tape, x, "Conv1d");
  const Shape &s = x.shape(), &of_w = w.value().shape();
  const bool sequences = of_w.size() == 3 && s.size() == 3;
  if (sequences) valid_groups(s[2], of_w[0], groups, "Conv1d");
  if (!sequences || s[2] != groups * of_w[2])
    throw UsageError(
        fmt::format("Conv1d with a weight of {}{} was given {}", to_string(of_w), in_groups(groups), to_string(s)),
        "it takes (N, T, C) with C in_channels, and a weight (O, K, C / groups)");
  const Window window = {.kernel = {1, of_w[1]}, .stride = {1, stride}, .padding = {0, padding}};
  const Var y = conv2d(tape, reshape(tape, x, {s[0], 1, s[1], s[2]}), w, b, window, Epilogue::kNone, groups);
  return reshape(tape, y, {s[0], y.shape()[2], y.shape()[3]});
}

namespace {

// The convolution from y to x, the other way round: its gradient of y is what this computes, and its result this one's
// gradient.
class ConvTransposeNode final : public Node {
 public:
  ConvTransposeNode(Var output, Var x, Parameter& w, Parameter* b, const Window& window)
      : Node(output, {&w, b}), x_(x), window_(window) {}
  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    Parameter &w = *parameters()[0], *const b = parameters()[1];
    const Tensor dy = tape.take_grad(output());
    if (wants_grad(&w)) {
      const auto target = w.contribute();
      backend.conv().backward_weight(dy, x_.value(), window_, target.accumulate, target.gradient, false, {});
    }
    if (wants_grad(b)) {
      const auto target = b->contribute();
      const std::int64_t channels = dy.size(3);
      backend.linear().backward_bias(dy.reshaped({dy.count() / channels, channels}), target.accumulate,
                                     target.gradient);
    }
    if (!x_.needs_grad()) return;
    tape.parameters_done(*this);
    Tensor dx = backend.empty(x_.shape(), dy.dtype());
    backend.conv().forward(dy, w.as(dy.dtype()), w.version(), {}, window_, Epilogue::kNone, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Window window_;
};

}  // namespace

Var conv_transpose2d(Tape& tape, Var x, Parameter& w, Parameter* b, const Window& window,
                     std::array<std::int64_t, 2> output_padding, std::int64_t groups) {
  check_operand(tape, x, "ConvTranspose2d");
  check_parameter(tape, w, "ConvTranspose2d");
  const Tensor& weight = w.value();
  if (x.shape().size() != 4 || weight.shape().size() != 4 || x.shape()[3] != weight.size(0))
    throw UsageError(fmt::format("ConvTranspose2d with a weight of {} was given {}", to_string(weight.shape()),
                                 to_string(x.shape())),
                     "it takes (N, H, W, I), and a weight (I, Kh, Kw, O / groups)");
  const std::int64_t channels = groups * weight.size(3);
  valid_groups(weight.size(0), channels, groups, "ConvTranspose2d");
  check_window(weight, window);
  check_further(tape, b, {channels}, "a bias", "ConvTranspose2d");
  Shape shape = {x.shape()[0], 0, 0, channels};
  for (int axis = 0; axis < 2; ++axis) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t in = x.shape()[axis + 1];
    const std::int64_t out = (in - 1) * window.stride[a] - 2 * window.padding[a] + window.kernel[a] + output_padding[a];
    if (output_padding[a] < 0 || output_padding[a] >= window.stride[a] || in < 1 || out < 1)
      throw UsageError(
          fmt::format("ConvTranspose2d of {} with window {}x{}, stride {}, padding {} and output padding {}",
                      to_string(x.shape()), window.kernel[0], window.kernel[1], window.stride[a], window.padding[a],
                      output_padding[a]),
          "output padding is from 0 to below the stride, and the result has at least one row and column");
    LOCKSTEP_ASSERT(window.output_extent(axis, out) == in);
    shape[axis + 1] = out;
  }
  const Tape::OpScope scope(tape, "conv_transpose2d", &w);
  const DType dtype = x.dtype();
  Backend& backend = tape.backend();
  Tensor y = backend.empty(shape, dtype);
  backend.conv().backward_input(x.value(), w.as(dtype), w.version(), window, y);
  if (b != nullptr) {
    const Tensor rows = y.reshaped({y.count() / channels, 1, channels});
    backend.embedding().add_rows(rows, b->as(dtype).reshaped({1, channels}), 0, rows);
  }
  const Var out = tape.make_var(std::move(y), needs_grad(x, w, b));
  tape.record<ConvTransposeNode>(out, x, w, b, window);
  return out;
}

}  // namespace lockstep::nn
