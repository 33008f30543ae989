#include "lockstep/nn/layers/layers.h"

#include <cmath>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/ops/transfer.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

std::unique_ptr<Parameter> uniform_parameter(Context& context, const Shape& shape, double bound,
                                             FileLayout layout = FileLayout::kSame) {
  auto parameter = std::make_unique<Parameter>(context.backend, shape, layout);
  if (!context.generator.makes_values()) return parameter;
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  context.generator.uniform(values, -bound, bound);
  context.backend.upload(std::as_bytes(std::span(values)), parameter->value());
  return parameter;
}

std::unique_ptr<Parameter> constant_parameter(Context& context, const Shape& shape, float value) {
  auto parameter = std::make_unique<Parameter>(context.backend, shape);
  context.backend.pointwise().fill(parameter->value(), value);
  return parameter;
}

std::unique_ptr<Parameter> normal_parameter(Context& context, const Shape& shape, double deviation,
                                            FileLayout layout = FileLayout::kSame) {
  auto parameter = std::make_unique<Parameter>(context.backend, shape, layout);
  if (!context.generator.makes_values()) return parameter;
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  context.generator.normal(values, 0.0, deviation);
  context.backend.upload(std::as_bytes(std::span(values)), parameter->value());
  return parameter;
}

double bound_for(std::int64_t fan_in) { return fan_in > 0 ? 1.0 / std::sqrt(static_cast<double>(fan_in)) : 0.0; }

}  // namespace

Linear::Linear(Context& context, std::int64_t in_features, std::int64_t out_features, bool bias)
    : weight_(register_parameter("weight",
                                 uniform_parameter(context, {out_features, in_features}, bound_for(in_features)))),
      bias_(bias ? &register_parameter("bias", uniform_parameter(context, {out_features}, bound_for(in_features)))
                 : nullptr) {}

Linear::Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Gpt2 style)
    : weight_(register_parameter(
          "weight", normal_parameter(context, {out_features, in_features}, style.deviation, FileLayout::kTransposed))),
      bias_(&register_parameter("bias", constant_parameter(context, {out_features}, 0.0f))) {}

Linear::Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Normal style)
    : weight_(register_parameter("weight", normal_parameter(context, {out_features, in_features}, style.deviation))),
      bias_(style.bias ? &register_parameter("bias", constant_parameter(context, {out_features}, 0.0f)) : nullptr) {}

Linear::Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Uniform style)
    : weight_(register_parameter("weight", uniform_parameter(context, {out_features, in_features}, style.bound))),
      bias_(&register_parameter("bias", constant_parameter(context, {out_features}, 0.0f))) {}

double Linear::xavier_bound(std::int64_t in_features, std::int64_t out_features) {
  return std::sqrt(6.0 / static_cast<double>(in_features + out_features));
}

Embedding::Embedding(Context& context, std::int64_t num_embeddings, std::int64_t embedding_dim, double deviation)
    : weight_(register_parameter("weight", normal_parameter(context, {num_embeddings, embedding_dim}, deviation))) {
  weight_.set_elementwise();
}

LayerNorm::LayerNorm(Context& context, std::int64_t normalized_shape, double eps)
    : eps_(eps),
      weight_(register_parameter("weight", constant_parameter(context, {normalized_shape}, 1.0f))),
      bias_(register_parameter("bias", constant_parameter(context, {normalized_shape}, 0.0f))) {}

RMSNorm::RMSNorm(Context& context, std::int64_t normalized_shape, double eps)
    : eps_(eps), weight_(register_parameter("weight", constant_parameter(context, {normalized_shape}, 1.0f))) {}

GroupNorm::GroupNorm(Context& context, std::int64_t num_groups, std::int64_t num_channels, double eps)
    : groups_(num_groups),
      eps_(eps),
      weight_(register_parameter("weight", constant_parameter(context, {num_channels}, 1.0f))),
      bias_(register_parameter("bias", constant_parameter(context, {num_channels}, 0.0f))) {
  if (num_groups < 1 || num_channels % num_groups != 0)
    throw UsageError(fmt::format("a GroupNorm of {} groups of {} channels", num_groups, num_channels),
                     "the channels are a multiple of the groups");
}

namespace {

const char* python(bool value) { return value ? "True" : "False"; }
std::string pair(const std::array<std::int64_t, 2>& values) { return fmt::format("({}, {})", values[0], values[1]); }
// One number where both are the same, as poolings are printed.
std::string one_or_pair(const std::array<std::int64_t, 2>& values) {
  return values[0] == values[1] ? std::to_string(values[0]) : pair(values);
}
std::string groups_and_bias(std::int64_t groups, const Parameter* bias) {
  return (groups == 1 ? "" : fmt::format(", groups={}", groups)) + (bias != nullptr ? "" : ", bias=False");
}

}  // namespace

std::string Linear::details() const {
  const Shape& w = weight_.value().shape();
  return fmt::format("in_features={}, out_features={}, bias={}", w[1], w[0], python(bias_ != nullptr));
}

std::string Embedding::details() const {
  return fmt::format("{}, {}", weight_.value().size(0), weight_.value().size(1));
}

std::string LayerNorm::details() const {
  return fmt::format("({},), eps={:g}, elementwise_affine=True, bias=True", weight_.value().count(), eps_);
}

std::string RMSNorm::details() const {
  return fmt::format("({},), eps={:g}, elementwise_affine=True", weight_.value().count(), eps_);
}

std::string GroupNorm::details() const {
  return fmt::format("{}, {}, eps={:g}, affine=True", groups_, weight_.value().count(), eps_);
}

std::string GELU::details() const {
  return fmt::format("approximate='{}'", kind_ == GeluKind::kTanh ? "tanh" : "none");
}

std::string Dropout::details() const { return fmt::format("p={:g}, inplace=False", p_); }

std::string Conv2d::details() const {
  const Shape& w = weight_.value().shape();
  std::string text = fmt::format("{}, {}, kernel_size={}, stride={}", groups_ * w[3], w[0], pair(window_.kernel),
                                 pair(window_.stride));
  if (window_.padding != std::array<std::int64_t, 2>{0, 0}) text += ", padding=" + pair(window_.padding);
  return text + groups_and_bias(groups_, bias_);
}

std::string Conv1d::details() const {
  const Shape& w = weight_.value().shape();
  std::string text = fmt::format("{}, {}, kernel_size=({},), stride=({},)", groups_ * w[2], w[0], w[1], stride_);
  if (padding_ != 0) text += fmt::format(", padding=({},)", padding_);
  return text + groups_and_bias(groups_, bias_);
}

std::string ConvTranspose2d::details() const {
  const Shape& w = weight_.value().shape();
  constexpr std::array<std::int64_t, 2> kNone = {0, 0};
  std::string text = fmt::format("{}, {}, kernel_size={}, stride={}", w[0], groups_ * w[3], pair(window_.kernel),
                                 pair(window_.stride));
  if (window_.padding != kNone) text += ", padding=" + pair(window_.padding);
  if (output_padding_ != kNone) text += ", output_padding=" + pair(output_padding_);
  return text + groups_and_bias(groups_, bias_);
}

std::string MaxPool2d::details() const {
  return fmt::format("kernel_size={}, stride={}, padding={}, dilation=1, ceil_mode=False", one_or_pair(window_.kernel),
                     one_or_pair(window_.stride), one_or_pair(window_.padding));
}

std::string AvgPool2d::details() const {
  return fmt::format("kernel_size={}, stride={}, padding={}", one_or_pair(window_.kernel), one_or_pair(window_.stride),
                     one_or_pair(window_.padding));
}

std::string AdaptiveAvgPool2d::details() const { return fmt::format("output_size=({}, {})", height_, width_); }

std::string BatchNorm::details() const {
  return fmt::format("{}, eps={:g}, momentum={:g}, affine=True, bias=True, track_running_stats=True",
                     weight_.value().count(), eps_, momentum_);
}

std::string Flatten::details() const { return "start_dim=1, end_dim=-1"; }

Recurrent::Recurrent(Context& context, RnnCell cell, std::int64_t input_size, std::int64_t hidden_size,
                     const RecurrentOptions& options)
    : cell_(cell), options_(options) {
  if (options.num_layers < 1 || hidden_size < 1)
    throw UsageError(fmt::format("{} {} of {} layers with {} features", cell == RnnCell::kGru ? "a" : "an",
                                 name_of(cell), options.num_layers, hidden_size),
                     "give at least one of each");
  const std::int64_t gates = gates_of(cell) * hidden_size;
  for (std::int64_t layer = 0; layer < options.num_layers; ++layer)
    for (const char* direction : {"", "_reverse"}) {
      if (*direction != '\0' && !options.bidirectional) continue;
      const auto make = [&](const char* name, const Shape& shape) -> Parameter& {
        return register_parameter(fmt::format("{}_l{}{}", name, layer, direction),
                                  uniform_parameter(context, shape, bound_for(hidden_size)));
      };
      Parameter& w_ih = make("weight_ih", {gates, layer == 0 ? input_size : num_directions() * hidden_size});
      Parameter& w_hh = make("weight_hh", {gates, hidden_size});
      Parameter* const b_ih = options.bias ? &make("bias_ih", {gates}) : nullptr;
      Parameter* const b_hh = options.bias ? &make("bias_hh", {gates}) : nullptr;
      layers_.push_back({w_ih, w_hh, b_ih, b_hh});
    }
}

Recurrent::Directions Recurrent::last_layer(Tape& tape, Var x, std::span<RnnState> states, const Tensor& lengths) {
  if (!states.empty() && states.size() != layers_.size())
    throw UsageError(
        fmt::format("{} states for {} {} of {} layers{}", states.size(), cell_ == RnnCell::kGru ? "a" : "an",
                    name_of(cell_), num_layers(), options_.bidirectional ? " in two directions" : ""),
        "give one for each layer and direction, or none");
  if (!options_.batch_first) x = transpose(tape, x, 0, 1);
  const auto directions = static_cast<std::size_t>(num_directions());
  Directions out;
  for (std::size_t layer = 0; layer * directions < layers_.size(); ++layer) {
    if (layer > 0) {
      x = directions == 1 ? out[0] : concat(tape, {out[0], out[1]}, -1);
      if (training())
        x = nn::dropout(tape, x, options_.dropout, options_.drop_layer + static_cast<std::int64_t>(layer) - 1);
    }
    for (std::size_t d = 0; d < directions; ++d) {
      const std::size_t at = layer * directions + d;
      out[d] = rnn(tape, x, layers_[at], {.cell = cell_, .reverse = d == 1, .lengths = lengths},
                   states.empty() ? nullptr : &states[at]);
    }
  }
  return out;
}

Var Recurrent::forward(Tape& tape, Var x, std::span<RnnState> states, const Tensor& lengths) {
  return name_in_errors([&] {
    const Directions out = last_layer(tape, x, states, lengths);
    const Var y = options_.bidirectional ? concat(tape, {out[0], out[1]}, -1) : out[0];
    return options_.batch_first ? y : transpose(tape, y, 0, 1);
  });
}

Vars Recurrent::forward_all(Tape& tape, const Vars& inputs) {
  if (inputs.size() == 2) return forward(tape, inputs[0], {}, inputs[1].value());
  return Module::forward_all(tape, inputs);
}

Var Recurrent::forward_last(Tape& tape, Var x) {
  return name_in_errors([&] {
    const Directions out = last_layer(tape, x, {}, {});
    const Var forward = take_position(tape, out[0], out[0].shape()[1] - 1);
    return options_.bidirectional ? concat(tape, {forward, take_position(tape, out[1], 0)}, -1) : forward;
  });
}

std::string Recurrent::details() const {
  std::string text = fmt::format("{}, {}", layers_[0].w_ih.value().size(1), layers_[0].w_hh.value().size(1));
  if (options_.num_layers > 1) text += fmt::format(", num_layers={}", options_.num_layers);
  if (!options_.bias) text += ", bias=False";
  if (options_.batch_first) text += ", batch_first=True";
  if (options_.dropout > 0.0) text += fmt::format(", dropout={:g}", options_.dropout);
  return options_.bidirectional ? text + ", bidirectional=True" : text;
}

Var Linear::forward(Tape& tape, Var x, Epilogue epilogue) {
  return name_in_errors([&] { return linear(tape, x, weight_, bias_, epilogue); });
}

namespace {

std::int64_t area_of(const Window& window) { return window.kernel[0] * window.kernel[1]; }

}  // namespace

Conv2d::Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window, bool bias,
               std::int64_t groups)
    : window_(window),
      groups_(valid_groups(in_channels, out_channels, groups, "Conv2d")),
      weight_(register_parameter(
          "weight", uniform_parameter(context, {out_channels, window.kernel[0], window.kernel[1], in_channels / groups},
                                      bound_for(in_channels / groups * area_of(window)), FileLayout::kOhwiToOihw))),
      bias_(bias ? &register_parameter("bias", uniform_parameter(context, {out_channels},
                                                                 bound_for(in_channels / groups * area_of(window))))
                 : nullptr) {}

Conv2d::Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window,
               FanOut style, std::int64_t groups)
    : Conv2d(context, in_channels, out_channels, window,
             Normal{std::sqrt(2.0 / static_cast<double>(out_channels * area_of(window))), style.bias}, groups) {}

Conv2d::Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window,
               Normal style, std::int64_t groups)
    : window_(window),
      groups_(valid_groups(in_channels, out_channels, groups, "Conv2d")),
      weight_(register_parameter(
          "weight", normal_parameter(context, {out_channels, window.kernel[0], window.kernel[1], in_channels / groups},
                                     style.deviation, FileLayout::kOhwiToOihw))),
      bias_(style.bias ? &register_parameter("bias", constant_parameter(context, {out_channels}, 0.0f)) : nullptr) {}

Conv1d::Conv1d(Context& context, std::int64_t in_channels, std::int64_t out_channels, std::int64_t kernel_size,
               std::int64_t stride, std::int64_t padding, bool bias, std::int64_t groups)
    : stride_(stride),
      padding_(padding),
      groups_(valid_groups(in_channels, out_channels, groups, "Conv1d")),
      weight_(register_parameter(
          "weight", uniform_parameter(context, {out_channels, kernel_size, in_channels / groups},
                                      bound_for(in_channels / groups * kernel_size), FileLayout::kOhwiToOihw))),
      bias_(bias ? &register_parameter("bias", uniform_parameter(context, {out_channels},
                                                                 bound_for(in_channels / groups * kernel_size)))
                 : nullptr) {}

ConvTranspose2d::ConvTranspose2d(Context& context, std::int64_t in_channels, std::int64_t out_channels,
                                 const Window& window, std::array<std::int64_t, 2> output_padding, bool bias,
                                 std::int64_t groups)
    : window_(window),
      output_padding_(output_padding),
      groups_(valid_groups(in_channels, out_channels, groups, "ConvTranspose2d")),
      weight_(register_parameter(
          "weight", uniform_parameter(context, {in_channels, window.kernel[0], window.kernel[1], out_channels / groups},
                                      bound_for(out_channels / groups * area_of(window)), FileLayout::kOhwiToOihw))),
      bias_(bias ? &register_parameter("bias", uniform_parameter(context, {out_channels},
                                                                 bound_for(out_channels / groups * area_of(window))))
                 : nullptr) {}

Var Conv2d::forward(Tape& tape, Var x, Epilogue epilogue) {
  return name_in_errors([&] { return conv2d(tape, x, weight_, bias_, window_, epilogue, groups_); });
}

Var Conv2d::forward(Tape& tape, Var x, Epilogue epilogue, const Window& max_pool) {
  return name_in_errors([&] { return conv2d_max_pool(tape, x, weight_, bias_, window_, epilogue, max_pool, groups_); });
}

BatchNorm::BatchNorm(Context& context, std::int64_t num_features, double eps, double momentum)
    : eps_(eps),
      momentum_(momentum),
      weight_(register_parameter("weight", constant_parameter(context, {num_features}, 1.0f))),
      bias_(register_parameter("bias", constant_parameter(context, {num_features}, 0.0f))),
      running_mean_(register_buffer("running_mean", context.backend, context.backend.zeros({num_features}))),
      running_variance_(register_buffer("running_var", context.backend, context.backend.empty({num_features}))),
      num_batches_tracked_(
          register_buffer("num_batches_tracked", context.backend, context.backend.empty({}, DType::kI64))) {
  context.backend.pointwise().fill(running_variance_, 1.0f);
  constexpr std::int64_t kNone = 0;
  context.backend.upload(std::as_bytes(std::span(&kNone, 1)), num_batches_tracked_);
}

void BatchNorm::start_at_zero() {
  weight_.backend().pointwise().fill(weight_.value(), 0.0f);
  weight_.changed();
}

Var BatchNorm::forward_add_relu(Tape& tape, Var x, Var residual) {
  if (!absorbed_) return normalise(tape, x, Epilogue::kRelu, residual);
  return name_in_errors([&] { return add_relu(tape, x, residual); });
}

namespace {

void set_values(Parameter& parameter, const std::vector<float>& values) {
  parameter.backend().upload(std::as_bytes(std::span(values)), parameter.value());
  parameter.changed();
}

}  // namespace

// (w x + b − mean) · scale + shift, where scale = gamma / sqrt(variance + eps).
void Conv2d::absorb(BatchNorm& norm) {
  Backend& backend = weight_.backend();
  const auto channels = static_cast<std::size_t>(weight_.value().size(0));
  if (norm.absorbed_ || norm.weight_.value().count() != weight_.value().size(0))
    throw UsageError(fmt::format("a convolution with {} output channels absorbs a batch normalisation over {}{}",
                                 weight_.value().size(0), norm.weight_.value().count(),
                                 norm.absorbed_ ? ", which another one has absorbed" : ""),
                     "fuse each normalisation with the one convolution that it follows");
  auto weights = values_of(backend, weight_.value());
  auto bias = bias_ != nullptr ? values_of(backend, bias_->value()) : std::vector<float>(channels);
  const auto gamma = values_of(backend, norm.weight_.value()), beta = values_of(backend, norm.bias_.value());
  const auto mean = values_of(backend, norm.running_mean_), variance = values_of(backend, norm.running_variance_);
  const std::size_t row = weights.size() / channels;
  for (std::size_t c = 0; c < channels; ++c) {
    const double scale = double{gamma[c]} / std::sqrt(double{variance[c]} + norm.eps_);
    for (std::size_t i = c * row; i < (c + 1) * row; ++i) weights[i] = static_cast<float>(double{weights[i]} * scale);
    bias[c] = static_cast<float>((double{bias[c]} - double{mean[c]}) * scale + double{beta[c]});
  }
  set_values(weight_, weights);
  if (bias_ == nullptr)
    bias_ = &register_parameter("bias", std::make_unique<Parameter>(backend, Shape{weight_.value().size(0)}));
  set_values(*bias_, bias);
  norm.absorbed_ = true;
}

Var BatchNorm::forward_after(Conv2d& conv, Tape& tape, Var x, Epilogue epilogue) {
  return absorbed_ ? conv.forward(tape, x, epilogue) : forward(tape, conv.forward(tape, x), epilogue);
}

Var BatchNorm::forward(Tape& tape, Var x, Epilogue epilogue) {
  if (absorbed_) return name_in_errors([&] { return activated(tape, x, epilogue); });
  return normalise(tape, x, epilogue, std::nullopt);
}

Var BatchNorm::normalise(Tape& tape, Var x, Epilogue epilogue, std::optional<Var> residual) {
  const BatchNormState state = {.running_mean = running_mean_,
                                .running_variance = running_variance_,
                                .momentum = momentum_,
                                .eps = eps_,
                                .exchange = exchange_,
                                .num_batches_tracked = &num_batches_tracked_};
  return name_in_errors([&] { return batch_norm(tape, x, weight_, bias_, state, training(), epilogue, residual); });
}

void Sequential::fuse_children() {
  for (std::size_t i = 0; i + 1 < steps_.size(); ++i) {
    auto* const conv = dynamic_cast<Conv2d*>(steps_[i]);
    auto* const norm = dynamic_cast<BatchNorm*>(steps_[i + 1]);
    if (conv != nullptr && norm != nullptr) conv->absorb(*norm);
  }
}

Var Sequential::forward(Tape& tape, Var x) {
  std::size_t i = 0;
  const auto next_is = [&]<class M>(M*& layer) {
    layer = i < steps_.size() ? dynamic_cast<M*>(steps_[i]) : nullptr;
    if (layer != nullptr) ++i;
    return layer != nullptr;
  };
  Linear* linear_layer = nullptr;
  Conv2d* conv_layer = nullptr;
  BatchNorm* norm_layer = nullptr;
  ReLU* relu_layer = nullptr;
  ReLU6* relu6_layer = nullptr;
  MaxPool2d* pool_layer = nullptr;
  const auto next_activation = [&] {
    if (next_is(relu_layer)) return Epilogue::kRelu;
    return next_is(relu6_layer) ? Epilogue::kRelu6 : Epilogue::kNone;
  };
  while (i < steps_.size()) {
    if (next_is(linear_layer)) {
      x = linear_layer->forward(tape, x, next_is(relu_layer) ? Epilogue::kRelu : Epilogue::kNone);
    } else if (next_is(norm_layer)) {
      x = norm_layer->forward(tape, x, next_activation());
    } else if (next_is(conv_layer)) {
      if (next_is(norm_layer)) {
        x = norm_layer->forward_after(*conv_layer, tape, x, next_activation());
        continue;
      }
      const Epilogue epilogue = next_activation();
      x = epilogue != Epilogue::kRelu6 && next_is(pool_layer)
              ? conv_layer->forward(tape, x, epilogue, pool_layer->window())
              : conv_layer->forward(tape, x, epilogue);
    } else {
      x = (*steps_[i++])(tape, x);
    }
  }
  return x;
}

}  // namespace lockstep::nn
