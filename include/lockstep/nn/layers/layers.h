// The layers: PyTorch's, with its names, argument meanings and initialisations. Shapes, types and probabilities that do
// not fit are UsageErrors of forward() (lockstep/nn/autograd/functions.h).
#pragma once

#include <array>
#include <optional>
#include <span>

#include "lockstep/nn/layers/module.h"

namespace lockstep::nn {

/// y = x · wᵀ + b. weight (out, in), bias (out), both uniform in ±1/sqrt(in): what PyTorch's
/// kaiming_uniform(a = sqrt(5)) amounts to.
class Linear final : public Module {
 public:
  Linear(Context& context, std::int64_t in_features, std::int64_t out_features, bool bias = true);
  /// GPT-2's: normal weights of this deviation, zero bias, and transposed in files.
  struct Gpt2 {
    double deviation = 0.02;
  };
  Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Gpt2 style);
  /// Normal weights of this deviation, zero bias, or none.
  struct Normal {
    double deviation;
    bool bias = true;
  };
  Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Normal style);
  /// Weights uniform in ±bound, zero bias.
  struct Uniform {
    double bound;
  };
  Linear(Context& context, std::int64_t in_features, std::int64_t out_features, Uniform style);
  /// Of PyTorch's xavier_uniform_: sqrt(6 / (in + out)) (Glorot and Bengio, 2010).
  static double xavier_bound(std::int64_t in_features, std::int64_t out_features);
  Var forward(Tape& tape, Var x) override { return forward(tape, x, Epilogue::kNone); }
  /// With the activation that follows fused in.
  Var forward(Tape& tape, Var x, Epilogue epilogue);
  /// As a model's last layer (nn::logits).
  Var logits(Tape& tape, Var x) {
    return name_in_errors([&] { return nn::logits(tape, x, weight_, bias_); });
  }
  std::string type_name() const override { return "Linear"; }
  std::string details() const override;

 private:
  Parameter& weight_;
  Parameter* bias_;
};

/// The rows of a table by their indices. weight (num, dim), normal with a deviation of 1 as PyTorch's, or what is
/// given.
class Embedding final : public Module {
 public:
  Embedding(Context& context, std::int64_t num_embeddings, std::int64_t embedding_dim, double deviation = 1.0);
  /// x (…): indices, i32 → (…, dim).
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return embedding(tape, x.value(), weight_); });
  }
  Parameter& weight() { return weight_; }
  std::string type_name() const override { return "Embedding"; }
  std::string details() const override;

 private:
  Parameter& weight_;
};

/// Over the last axis. weight ones, bias zeros.
class LayerNorm final : public Module {
 public:
  explicit LayerNorm(Context& context, std::int64_t normalized_shape, double eps = 1e-5);
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return layer_norm(tape, x, weight_, &bias_, eps_); });
  }
  /// add(x, y), and forward() of that, in one pass.
  SumAndNorm forward_added(Tape& tape, Var x, Var y) {
    return name_in_errors([&] { return add_layer_norm(tape, x, y, weight_, &bias_, eps_); });
  }
  std::string type_name() const override { return "LayerNorm"; }
  std::string details() const override;

 private:
  double eps_;
  Parameter& weight_;
  Parameter& bias_;
};

/// rms_norm() over the last axis. weight ones.
class RMSNorm final : public Module {
 public:
  explicit RMSNorm(Context& context, std::int64_t normalized_shape, double eps = 1e-6);
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return rms_norm(tape, x, weight_, eps_); });
  }
  std::string type_name() const override { return "RMSNorm"; }
  std::string details() const override;

 private:
  double eps_;
  Parameter& weight_;
};

/// group_norm() of (N, …, C). weight ones, bias zeros.
class GroupNorm final : public Module {
 public:
  GroupNorm(Context& context, std::int64_t num_groups, std::int64_t num_channels, double eps = 1e-5);
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return group_norm(tape, x, groups_, weight_, &bias_, eps_); });
  }
  std::string type_name() const override { return "GroupNorm"; }
  std::string details() const override;

 private:
  std::int64_t groups_;
  double eps_;
  Parameter& weight_;
  Parameter& bias_;
};

class GELU final : public Module {
 public:
  explicit GELU(GeluKind kind = GeluKind::kErf) : kind_(kind) {}
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return gelu(tape, x, kind_); });
  }
  std::string type_name() const override { return "GELU"; }
  std::string details() const override;

 private:
  GeluKind kind_;
};

class SiLU final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return silu(tape, x); });
  }
  std::string type_name() const override { return "SiLU"; }
};
class Sigmoid final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return sigmoid(tape, x); });
  }
  std::string type_name() const override { return "Sigmoid"; }
};
class Tanh final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return tanh(tape, x); });
  }
  std::string type_name() const override { return "Tanh"; }
};

/// In training mode; otherwise nothing. `layer` identifies a dropout within its model.
class Dropout final : public Module {
 public:
  Dropout(double p, std::int64_t layer) : p_(p), layer_(layer) {}
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return training() ? dropout(tape, x, p_, layer_) : x; });
  }
  std::string type_name() const override { return "Dropout"; }
  std::string details() const override;

 private:
  double p_;
  std::int64_t layer_;
};

/// Of recurrent layers, as in PyTorch, but for batch_first, which is the default here. In training mode what a layer
/// hands to the next is dropped with probability `dropout`; `drop_layer` and the num_layers - 2 numbers that follow
/// identify these dropouts within the model.
struct RecurrentOptions {
  std::int64_t num_layers = 1;
  bool bias = true;
  bool batch_first = true;
  double dropout = 0.0;
  bool bidirectional = false;
  std::int64_t drop_layer = 0;
};

/// Recurrent layers, one on the other: PyTorch's, in D directions, which are two where they are bidirectional. Of G
/// gates: weight_ih_l0 (G · hidden, input), weight_hh_l0 (G · hidden, hidden), bias_ih_l0, bias_hh_l0 (G · hidden), of
/// the other direction …_l0_reverse, then …_l1, whose input is that of D · hidden features, and so on, all uniform in
/// ±1/sqrt(hidden).
class Recurrent : public Module {
 public:
  /// x (N, T, input) or (N, T, W, C) → (N, T, D · hidden), where the batch is not first (T, N, …) → (T, N, D · hidden);
  /// every sequence begins with zeros.
  Var forward(Tape& tape, Var x) override { return forward(tape, x, {}); }
  /// Begins with `states`, those of layer l in direction d at l · D + d, and leaves there the states with which the
  /// next call continues. Empty: begins with zeros, and returns no states. lengths (N) i32, on the device: the steps of
  /// each sequence, from 0 to T, as if it were packed: the outputs of its padding are 0, states are those of its last
  /// step, and the reverse direction begins there. Undefined: T. `states` is not used after the call; after an error
  /// its content is unspecified.
  Var forward(Tape& tape, Var x, std::span<RnnState> states, const Tensor& lengths = {});
  /// Of x, or of x and lengths.
  Vars forward_all(Tape& tape, const Vars& inputs) override;
  /// What the last layer hands out when it has read all, (N, D · hidden): in the reverse direction at the first step.
  Var forward_last(Tape& tape, Var x);
  std::int64_t num_layers() const { return options_.num_layers; }
  std::int64_t num_directions() const { return options_.bidirectional ? 2 : 1; }
  std::string type_name() const override { return name_of(cell_); }
  std::string details() const override;

 protected:
  /// Throws UsageError without a layer or a feature.
  Recurrent(Context& context, RnnCell cell, std::int64_t input_size, std::int64_t hidden_size,
            const RecurrentOptions& options);

 private:
  using Directions = std::array<Var, 2>;

  Directions last_layer(Tape& tape, Var x, std::span<RnnState> states, const Tensor& lengths);

  RnnCell cell_;
  RecurrentOptions options_;
  std::vector<RnnParameters> layers_;  // of layer l in direction d at l · D + d
};

/// Plain layers: tanh, or ReLU.
class Rnn final : public Recurrent {
 public:
  enum class Nonlinearity : std::uint8_t { kTanh, kRelu };
  Rnn(Context& context, std::int64_t input_size, std::int64_t hidden_size, const RecurrentOptions& options = {},
      Nonlinearity nonlinearity = Nonlinearity::kTanh)
      : Recurrent(context, nonlinearity == Nonlinearity::kTanh ? RnnCell::kTanh : RnnCell::kRelu, input_size,
                  hidden_size, options) {}
};

/// Layers of long short-term memory.
class Lstm final : public Recurrent {
 public:
  Lstm(Context& context, std::int64_t input_size, std::int64_t hidden_size, const RecurrentOptions& options = {})
      : Recurrent(context, RnnCell::kLstm, input_size, hidden_size, options) {}
};

/// Gated layers.
class Gru final : public Recurrent {
 public:
  Gru(Context& context, std::int64_t input_size, std::int64_t hidden_size, const RecurrentOptions& options = {})
      : Recurrent(context, RnnCell::kGru, input_size, hidden_size, options) {}
};

class BatchNorm;

/// weight (out, kernel, kernel, in / groups) in memory and (out, in / groups, kernel, kernel) in files; uniform in
/// ±1/sqrt(fan in). Throws UsageError unless `groups` divides both numbers of channels (conv2d), as the next two do.
class Conv2d final : public Module {
 public:
  Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window, bool bias = true,
         std::int64_t groups = 1);
  /// Normal with a deviation of sqrt(2 / (out · kernel area)), PyTorch's kaiming_normal(mode = "fan_out"); a bias
  /// begins with zeros.
  struct FanOut {
    bool bias = false;
  };
  Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window, FanOut style,
         std::int64_t groups = 1);
  /// Normal with this deviation; a bias begins with zeros.
  struct Normal {
    double deviation;
    bool bias = true;
  };
  Conv2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window, Normal style,
         std::int64_t groups = 1);
  Var forward(Tape& tape, Var x) override { return forward(tape, x, Epilogue::kNone); }
  Var forward(Tape& tape, Var x, Epilogue epilogue);
  /// And with the maximum pooling after that.
  Var forward(Tape& tape, Var x, Epilogue epilogue, const Window& max_pool);
  /// From now on computes what `norm` makes of its result in evaluation mode, and `norm` hands that on as it is. For
  /// fuse_children(). Waits for the device. Throws UsageError for another number of channels, and for a norm that is
  /// absorbed already.
  void absorb(BatchNorm& norm);
  std::string type_name() const override { return "Conv2d"; }
  std::string details() const override;

 private:
  Window window_;
  std::int64_t groups_;
  Parameter& weight_;
  Parameter* bias_;
};

/// weight (out, kernel, in / groups) in memory and (out, in / groups, kernel) in files; uniform in ±1/sqrt(fan in). x
/// is (N, T, in).
class Conv1d final : public Module {
 public:
  Conv1d(Context& context, std::int64_t in_channels, std::int64_t out_channels, std::int64_t kernel_size,
         std::int64_t stride = 1, std::int64_t padding = 0, bool bias = true, std::int64_t groups = 1);
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return conv1d(tape, x, weight_, bias_, stride_, padding_, groups_); });
  }
  std::string type_name() const override { return "Conv1d"; }
  std::string details() const override;

 private:
  std::int64_t stride_, padding_, groups_;
  Parameter& weight_;
  Parameter* bias_;
};

/// weight (in, kernel, kernel, out / groups) in memory and (in, out / groups, kernel, kernel) in files; uniform in
/// ±1/sqrt(out / groups · kernel area), as PyTorch's.
class ConvTranspose2d final : public Module {
 public:
  ConvTranspose2d(Context& context, std::int64_t in_channels, std::int64_t out_channels, const Window& window,
                  std::array<std::int64_t, 2> output_padding = {0, 0}, bool bias = true, std::int64_t groups = 1);
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return conv_transpose2d(tape, x, weight_, bias_, window_, output_padding_, groups_); });
  }
  std::string type_name() const override { return "ConvTranspose2d"; }
  std::string details() const override;

 private:
  Window window_;
  std::array<std::int64_t, 2> output_padding_;
  std::int64_t groups_;
  Parameter& weight_;
  Parameter* bias_;
};

class MaxPool2d final : public Module {
 public:
  explicit MaxPool2d(const Window& window) : window_(window) {}
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return pool2d(tape, PoolKind::kMax, x, window_); });
  }
  const Window& window() const { return window_; }
  std::string type_name() const override { return "MaxPool2d"; }
  std::string details() const override;

 private:
  Window window_;
};

class AvgPool2d final : public Module {
 public:
  explicit AvgPool2d(const Window& window) : window_(window) {}
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return pool2d(tape, PoolKind::kAverage, x, window_); });
  }
  std::string type_name() const override { return "AvgPool2d"; }
  std::string details() const override;

 private:
  Window window_;
};

class AdaptiveAvgPool2d final : public Module {
 public:
  AdaptiveAvgPool2d(std::int64_t height, std::int64_t width) : height_(height), width_(width) {}
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return adaptive_avg_pool2d(tape, x, height_, width_); });
  }
  std::string type_name() const override { return "AdaptiveAvgPool2d"; }
  std::string details() const override;

 private:
  std::int64_t height_, width_;
};

/// Over the last axis of (N, H, W, C) or (N, C). weight ones, bias zeros, running_mean zeros, running_var ones,
/// num_batches_tracked 0 (i64).
class BatchNorm final : public Module {
 public:
  BatchNorm(Context& context, std::int64_t num_features, double eps = 1e-5, double momentum = 0.1);
  Var forward(Tape& tape, Var x) override { return forward(tape, x, Epilogue::kNone); }
  /// With the activation that follows.
  Var forward(Tape& tape, Var x, Epilogue epilogue);
  /// relu(forward(x) + residual)
  Var forward_add_relu(Tape& tape, Var x, Var residual);
  /// Whether a convolution computes all of it (Conv2d::absorb).
  bool absorbed() const { return absorbed_; }
  /// The activation of norm(conv(x)); `conv` computes all of it where it has absorbed this.
  Var forward_after(Conv2d& conv, Tape& tape, Var x, Epilogue epilogue);
  /// Sets the weight to 0.
  void start_at_zero();
  /// In training mode, statistics are from now on over the rows of all ranks of `exchange`; the ranks then run forward
  /// and backward in step, also those without rows. nullptr: again its own. Not between forward and backward: the tape
  /// refers to what it has replaced.
  void synchronise(std::shared_ptr<StatisticsExchange> exchange) { exchange_ = std::move(exchange); }
  bool synchronised() const { return exchange_ != nullptr; }
  std::int64_t num_features() const { return weight_.value().count(); }
  std::string type_name() const override { return synchronised() ? "SyncBatchNorm" : "BatchNorm2d"; }
  std::string details() const override;

 private:
  friend class Conv2d;

  Var normalise(Tape& tape, Var x, Epilogue epilogue, std::optional<Var> residual);

  double eps_, momentum_;
  bool absorbed_ = false;
  std::shared_ptr<StatisticsExchange> exchange_;
  Parameter& weight_;
  Parameter& bias_;
  Tensor& running_mean_;
  Tensor& running_variance_;
  Tensor& num_batches_tracked_;
};

class ReLU final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return relu(tape, x); });
  }
  std::string type_name() const override { return "ReLU"; }
};

class ReLU6 final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return relu6(tape, x); });
  }
  std::string type_name() const override { return "ReLU6"; }
};

class Flatten final : public Module {
 public:
  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] { return flatten(tape, x); });
  }
  std::string type_name() const override { return "Flatten"; }
  std::string details() const override;
};

/// One after the other; children are named "0", "1", …. A ReLU after a Linear, Conv2d or BatchNorm runs inside it, a
/// ReLU6 inside of the latter two, and a MaxPool2d inside of the Conv2d before it or before its ReLU.
class Sequential final : public Module {
 public:
  Sequential() = default;
  template <class M>
  Sequential& then(std::unique_ptr<M> module) {
    steps_.push_back(&register_module(std::to_string(steps_.size()), std::move(module)));
    return *this;
  }
  Var forward(Tape& tape, Var x) override;
  std::string type_name() const override { return "Sequential"; }

 protected:
  void fuse_children() override;

 private:
  std::vector<Module*> steps_;
};

}  // namespace lockstep::nn
