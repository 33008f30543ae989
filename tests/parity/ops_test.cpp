// Single operators and their gradients, against PyTorch's (make_ops.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iostream>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/losses/losses.h"
#include "tests/nn/gradient_backend.h"
#include "tests/parity/counter.h"
#include "tests/parity/golden.h"

namespace lockstep::parity {
namespace {

using Extents = std::vector<std::int64_t>;

class Ops : public ::testing::Test {
 protected:
  Ops() : backend_(nn::testing::make_gradient_backend()), tape_(*backend_) {}

  // All tests share it, so that the last one knows what none of them has compared; where a filter leaves some out,
  // nobody can.
  static Golden& golden() {
    static Golden shared("ops");
    return shared;
  }
  static void TearDownTestSuite() {
    const auto& suite = *::testing::UnitTest::GetInstance()->current_test_suite();
    if (suite.test_to_run_count() + suite.disabled_test_count() >= suite.total_test_count()) {
      EXPECT_EQ(golden().not_compared(), std::vector<std::string>{});
    }
  }

  nn::Context context() { return {*backend_, generator_}; }

  nn::Var input(const std::string& name, const Extents& shape, float scale = 1.0f) {
    auto values = uniform(name + "/x", count_of(shape));
    for (float& value : values) value *= scale;
    return tape_.differentiable_input(upload(*backend_, values, shape));
  }

  // The mean squared error against the target, and its gradients.
  void expect_all(const std::string& name, nn::Var x, nn::Var y, const Extents& output_shape, nn::Module* module) {
    const nn::Tensor& output = y.value();
    const auto count = static_cast<float>(output.count());
    ASSERT_EQ(output.count(), count_of(output_shape)) << name;
    const auto loss = nn::squared_error(
        tape_, y, upload(*backend_, uniform(name + "/target", output.count()), output_shape), 1.0f / count);
    golden().expect(name + "/output", download(*backend_, output), kOutputs);
    golden().expect(name + "/loss", std::array{download(*backend_, loss.totals())[0] / count}, kOutputs);
    tape_.backward(loss.value);
    if (x.needs_grad()) golden().expect(name + "/gradient/x", download(*backend_, tape_.grad(x)), kGradients);
    if (module != nullptr) {
      for (const auto& [key, parameter] : module->named_parameters())
        golden().expect(name + "/gradient/" + key, gradient_of(*backend_, *parameter), kGradients);
      for (const auto& [key, tensor, backend] : module->named_buffers())
        if (module->training() && tensor->dtype() == DType::kF32)
          golden().expect(name + "/after/" + key, download(*backend, *tensor), kOutputs);
    }
    EXPECT_EQ(golden().not_compared(name + "/"), std::vector<std::string>{});
    std::cout << name << ": output " << golden().worst(name + "/output") << ", gradient "
              << golden().worst(name + "/gradient") << "\n";
    tape_.reset();
  }

  template <class M>
  void check(const std::string& name, std::unique_ptr<M> module, const Extents& in, const Extents& out,
             bool training = true) {
    SCOPED_TRACE(name);
    fill(*module, name);
    module->train(training);
    const nn::Var x = input(name, in);
    expect_all(name, x, module->forward(tape_, x), out, module.get());
  }

  void check(const std::string& name, const std::function<nn::Var(nn::Var)>& op, const Extents& in,
             const Extents& out) {
    SCOPED_TRACE(name);
    const nn::Var x = input(name, in);
    expect_all(name, x, op(x), out, nullptr);
  }

  template <class M, class... Args>
  std::unique_ptr<M> make(Args&&... args) {
    auto built_in = context();
    return std::make_unique<M>(built_in, std::forward<Args>(args)...);
  }

  nn::Generator generator_{1};
  std::unique_ptr<nn::Backend> backend_;
  nn::Tape tape_;
};

nn::Window square(std::int64_t kernel, std::int64_t stride, std::int64_t padding) {
  return {.kernel = {kernel, kernel}, .stride = {stride, stride}, .padding = {padding, padding}};
}

TEST_F(Ops, Linear) {
  check("linear", make<nn::Linear>(7, 3), {5, 7}, {5, 3});
  check("linear-3d", make<nn::Linear>(7, 12), {2, 5, 7}, {2, 5, 12});
  check("linear-no-bias", make<nn::Linear>(33, 17, false), {4, 33}, {4, 17});
}

// Fused, where PyTorch has two modules.
TEST_F(Ops, LinearWithGelu) {
  class Fused final : public nn::Module {
   public:
    explicit Fused(nn::Context& context) : linear_(register_module("0", std::make_unique<nn::Linear>(context, 6, 9))) {}
    nn::Var forward(nn::Tape& tape, nn::Var x) override { return linear_.forward(tape, x, nn::Epilogue::kGelu); }

   private:
    nn::Linear& linear_;
  };
  check("linear-gelu", make<Fused>(), {3, 6}, {3, 9});
}

TEST_F(Ops, Convolution) {
  check("conv-3x3", make<nn::Conv2d>(3, 5, square(3, 1, 1)), {2, 3, 6, 7}, {2, 5, 6, 7});
  check("conv-3x3-stride-2", make<nn::Conv2d>(16, 32, square(3, 2, 1), false), {2, 16, 9, 8}, {2, 32, 5, 4});
  check("conv-1x1-stride-2", make<nn::Conv2d>(16, 24, square(1, 2, 0), false), {3, 16, 5, 5}, {3, 24, 3, 3});
  check("conv-7x7-stride-2", make<nn::Conv2d>(3, 8, square(7, 2, 3)), {1, 3, 17, 15}, {1, 8, 9, 8});
  check("conv-uneven", make<nn::Conv2d>(4, 3, nn::Window{.kernel = {5, 2}, .stride = {2, 1}, .padding = {2, 1}}),
        {2, 4, 9, 5}, {2, 3, 5, 6});
  check("conv-groups", make<nn::Conv2d>(6, 9, square(3, 1, 1), true, 3), {2, 6, 6, 7}, {2, 9, 6, 7});
  check("conv-depthwise", make<nn::Conv2d>(32, 32, square(3, 2, 1), false, 32), {2, 32, 9, 8}, {2, 32, 5, 4});
  check("conv-depthwise-twice",
        make<nn::Conv2d>(5, 10, nn::Window{.kernel = {5, 2}, .stride = {2, 1}, .padding = {2, 1}}, true, 5),
        {2, 5, 9, 5}, {2, 10, 5, 6});
}

TEST_F(Ops, Pooling) {
  check("max-pool-2", std::make_unique<nn::MaxPool2d>(square(2, 2, 0)), {2, 3, 6, 9}, {2, 3, 3, 4});
  check("max-pool-3-stride-2", std::make_unique<nn::MaxPool2d>(square(3, 2, 1)), {2, 5, 8, 7}, {2, 5, 4, 4});
  check("avg-pool-2", std::make_unique<nn::AvgPool2d>(square(2, 2, 0)), {2, 3, 6, 9}, {2, 3, 3, 4});
  check("avg-pool-3-stride-2", std::make_unique<nn::AvgPool2d>(square(3, 2, 1)), {2, 5, 8, 7}, {2, 5, 4, 4});
  check("adaptive-avg-pool-7", std::make_unique<nn::AdaptiveAvgPool2d>(7, 7), {2, 3, 3, 10}, {2, 3, 7, 7});
  check("adaptive-avg-pool-uneven", std::make_unique<nn::AdaptiveAvgPool2d>(4, 5), {2, 5, 9, 3}, {2, 5, 4, 5});
}

TEST_F(Ops, BatchNorm) {
  check("batch-norm-2d", make<nn::BatchNorm>(6), {3, 6, 4, 5}, {3, 6, 4, 5});
  check("batch-norm-2d-evaluated", make<nn::BatchNorm>(6), {3, 6, 4, 5}, {3, 6, 4, 5}, false);
  check("batch-norm-1d", make<nn::BatchNorm>(6), {9, 6}, {9, 6});
}

TEST_F(Ops, LayerNorm) {
  check("layer-norm", make<nn::LayerNorm>(24), {2, 5, 24}, {2, 5, 24});
  check("layer-norm-wide", make<nn::LayerNorm>(771), {3, 771}, {3, 771});
}

TEST_F(Ops, OtherNorms) {
  check("rms-norm", make<nn::RMSNorm>(24), {2, 5, 24}, {2, 5, 24});
  check("group-norm", make<nn::GroupNorm>(3, 6), {2, 6, 4, 5}, {2, 6, 4, 5});
}

TEST_F(Ops, OtherConvolutions) {
  using Pair = std::array<std::int64_t, 2>;
  check("conv1d", make<nn::Conv1d>(3, 5, 3, 2, 1), {2, 9, 3}, {2, 5, 5});
  check("conv1d-groups", make<nn::Conv1d>(6, 4, 3, 2, 1, true, 2), {2, 9, 6}, {2, 5, 4});
  check("conv-transpose-groups", make<nn::ConvTranspose2d>(6, 4, square(3, 2, 1), Pair{1, 1}, true, 2), {2, 6, 4, 5},
        {2, 4, 8, 10});
  check("conv-transpose", make<nn::ConvTranspose2d>(3, 5, square(3, 2, 1), Pair{1, 1}), {2, 3, 4, 5}, {2, 5, 8, 10});
  check("conv-transpose-uneven",
        make<nn::ConvTranspose2d>(4, 3, nn::Window{.kernel = {4, 2}, .stride = {2, 1}, .padding = {1, 0}}, Pair{1, 0},
                                  false),
        {2, 4, 5, 3}, {2, 3, 11, 4});
}

// From parts.
TEST_F(Ops, RotaryAttention) {
  const nn::RotaryAngles angles(*backend_, 13, 8);
  check("rotary-attention",
        [&](nn::Var qkv) {
          const auto part = [&](std::int64_t i) { return nn::slice(tape_, qkv, -1, 24 * i, 24 * (i + 1)); };
          const auto heads = [&](nn::Var x) {
            return nn::transpose(tape_, nn::reshape(tape_, x, {2, 13, 3, 8}), 1, 2);
          };
          const nn::Var q = heads(nn::rotary(tape_, part(0), angles)), k = heads(nn::rotary(tape_, part(1), angles));
          const nn::Var scores = nn::affine(tape_, nn::matmul(tape_, q, k, {.b = true}), 1 / std::sqrt(8.0f));
          const nn::Var mixed = nn::matmul(tape_, nn::softmax(tape_, scores), heads(part(2)));
          return nn::reshape(tape_, nn::transpose(tape_, mixed, 1, 2), {2, 13, 24});
        },
        {2, 13, 72}, {2, 13, 24});
}

TEST_F(Ops, BroadcastParameter) {
  class Scale final : public nn::Module {
   public:
    explicit Scale(nn::Context& context)
        : weight_(register_parameter("weight", std::make_unique<nn::Parameter>(context.backend, nn::Shape{5, 1}))) {}
    nn::Var forward(nn::Tape& tape, nn::Var x) override {
      const nn::Var w = nn::variable(tape, weight_);
      return nn::mean_over(tape, nn::add(tape, nn::mul(tape, x, w), nn::square(tape, w)), {2});
    }

   private:
    nn::Parameter& weight_;
  };
  check("broadcast", make<Scale>(), {3, 5, 4}, {3, 5});
}

TEST_F(Ops, OverAxes) {
  check("softmax", [&](nn::Var x) { return nn::softmax(tape_, x, 1); }, {2, 7, 5}, {2, 7, 5});
  check("log-softmax", [&](nn::Var x) { return nn::log_softmax(tape_, x); }, {3, 50}, {3, 50});
  check("amax", [&](nn::Var x) { return nn::max_over(tape_, x, {0, 2}); }, {3, 5, 4}, {5});
}

TEST_F(Ops, Pointwise) {
  check("pow", [&](nn::Var x) { return nn::pow(tape_, x, 3.0f); }, {3, 50}, {3, 50});
  check("clamp", [&](nn::Var x) { return nn::clamp(tape_, x, -0.4f, 0.6f); }, {3, 50}, {3, 50});
  check("sigmoid", std::make_unique<nn::Sigmoid>(), {3, 50}, {3, 50});
  check("tanh", std::make_unique<nn::Tanh>(), {3, 50}, {3, 50});

  check("relu", std::make_unique<nn::ReLU>(), {3, 50}, {3, 50});
  check("relu6", [&](nn::Var x) { return nn::relu6(tape_, nn::affine(tape_, x, 10.0f)); }, {3, 50}, {3, 50});
  check("silu", [&](nn::Var x) { return nn::silu(tape_, x); }, {3, 50}, {3, 50});
  check("gelu-erf", std::make_unique<nn::GELU>(nn::GeluKind::kErf), {3, 50}, {3, 50});
  check("gelu-tanh", std::make_unique<nn::GELU>(nn::GeluKind::kTanh), {3, 50}, {3, 50});
}

TEST_F(Ops, FlattenPutsChannelsFirst) {
  auto both = std::make_unique<nn::Sequential>();
  both->then(std::make_unique<nn::Flatten>()).then(make<nn::Linear>(60, 4));
  check("flatten", std::move(both), {2, 3, 4, 5}, {2, 4});
}

TEST_F(Ops, CausalAttention) {
  check("attention", [&](nn::Var x) { return nn::causal_attention(tape_, x, 3); }, {2, 13, 72}, {2, 13, 24});
  check("attention-long", [&](nn::Var x) { return nn::causal_attention(tape_, x, 2); }, {1, 150, 96}, {1, 150, 32});
}

TEST_F(Ops, Recurrent) {
  using Options = nn::RecurrentOptions;
  check("lstm", make<nn::Lstm>(5, 7, Options{.num_layers = 2}), {3, 6, 5}, {3, 6, 7});
  check("lstm-bidirectional", make<nn::Lstm>(5, 7, Options{.num_layers = 2, .bidirectional = true}), {3, 6, 5},
        {3, 6, 14});
  check("gru", make<nn::Gru>(5, 7, Options{.num_layers = 2}), {3, 6, 5}, {3, 6, 7});
  check("gru-wide", make<nn::Gru>(33, 65), {2, 4, 33}, {2, 4, 65});
  check("gru-no-bias", make<nn::Gru>(3, 9, Options{.num_layers = 2, .bias = false}), {2, 5, 3}, {2, 5, 9});
  check("gru-bidirectional", make<nn::Gru>(5, 7, Options{.num_layers = 3, .bidirectional = true}), {3, 6, 5},
        {3, 6, 14});
  check("rnn-tanh", make<nn::Rnn>(5, 7, Options{.num_layers = 2}), {3, 6, 5}, {3, 6, 7});
  check("rnn-relu", make<nn::Rnn>(5, 37, Options{.num_layers = 2}, nn::Rnn::Nonlinearity::kRelu), {3, 6, 5},
        {3, 6, 37});
  check("rnn-bidirectional", make<nn::Rnn>(5, 7, Options{.num_layers = 2, .bidirectional = true}), {3, 6, 5},
        {3, 6, 14});
}

// Of sequences of different lengths, as pack_padded_sequence() makes them.
TEST_F(Ops, RecurrentOfPackedSequences) {
  using Options = nn::RecurrentOptions;
  const auto check_packed = [&](const std::string& name, std::unique_ptr<nn::Recurrent> layers, std::int64_t features) {
    SCOPED_TRACE(name);
    fill(*layers, name);
    const nn::Var x = input(name, {3, 6, 5});
    const nn::Tensor lengths = upload(*backend_, std::vector<std::int32_t>{4, 6, 1}, nn::Shape{3});
    expect_all(name, x, layers->forward_all(tape_, {x, tape_.input(lengths)}), {3, 6, features}, layers.get());
  };
  check_packed("lstm-packed", make<nn::Lstm>(5, 7, Options{.num_layers = 2, .bidirectional = true}), 14);
  check_packed("gru-packed", make<nn::Gru>(5, 7, Options{.num_layers = 2, .bidirectional = true}), 14);
  check_packed("rnn-packed", make<nn::Rnn>(5, 7), 7);
}

TEST_F(Ops, Embedding) {
  const auto table = make<nn::Embedding>(11, 6);
  fill(*table, "embedding");
  const nn::Var x = tape_.input(upload(*backend_, below<std::int32_t>("embedding/x", 24, 11), nn::Shape{3, 8}));
  expect_all("embedding", x, table->forward(tape_, x), {3, 8, 6}, table.get());
}

TEST_F(Ops, Positions) {
  class Positions final : public nn::Module {
   public:
    explicit Positions(nn::Context& context)
        : weight_(register_parameter("weight", std::make_unique<nn::Parameter>(context.backend, nn::Shape{9, 8}))) {}
    nn::Var forward(nn::Tape& tape, nn::Var x) override { return nn::add_positions(tape, x, weight_); }

   private:
    nn::Parameter& weight_;
  };
  check("positions", make<Positions>(), {2, 7, 8}, {2, 7, 8});
}

TEST_F(Ops, CrossEntropy) {
  const std::tuple<std::string, Extents, float> cases[] = {{"cross-entropy", {7, 10}, 0.0f},
                                                           {"cross-entropy-tokens", {2, 5, 33}, 0.0f},
                                                           {"cross-entropy-smoothed", {7, 10}, 0.1f}};
  for (const auto& [name, shape, smoothing] : cases) {
    const std::int64_t classes = shape.back(), rows = count_of(shape) / classes;
    const nn::Var x = input(name, shape, 4.0f);
    const auto labels = upload(*backend_, below<std::int32_t>(name + "/labels", rows, classes),
                               nn::Shape(std::span(shape).first(shape.size() - 1)));
    const auto loss = nn::cross_entropy(tape_, x, labels, 1.0f / static_cast<float>(rows), smoothing);
    golden().expect(name + "/loss", std::array{download(*backend_, loss.totals())[0] / static_cast<float>(rows)},
                    kOutputs);
    tape_.backward(loss.value);
    golden().expect(name + "/gradient/x", download(*backend_, tape_.grad(x)), kGradients);
    EXPECT_EQ(golden().not_compared(name + "/"), std::vector<std::string>{});
    tape_.reset();
  }
}

// Probabilities in place of labels, and labels that are ignored, of whose divisor those are no part.
TEST_F(Ops, OtherCrossEntropies) {
  const auto compare = [&](const std::string& name, const nn::Var x, const nn::Loss& loss, float rows) {
    golden().expect(name + "/loss", std::array{download(*backend_, loss.totals())[0] / rows}, kOutputs);
    tape_.backward(loss.value);
    golden().expect(name + "/gradient/x", download(*backend_, tape_.grad(x)), kGradients);
    EXPECT_EQ(golden().not_compared(name + "/"), std::vector<std::string>{});
    tape_.reset();
  };
  struct Soft {
    std::string name;
    Extents shape;
    double smoothing;
    bool weighted;
  };
  for (const auto& [name, shape, smoothing, weighted] :
       {Soft{"soft-cross-entropy", {7, 10}, 0, false}, Soft{"soft-cross-entropy-smoothed", {5, 33}, 0.1, false},
        Soft{"soft-cross-entropy-weighted", {7, 10}, 0.2, true}}) {
    const std::int64_t rows = shape[0], classes = shape[1];
    const nn::Var x = input(name, shape, 4.0f);
    auto targets = uniform(name + "/targets", rows * classes);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto row =
          std::span(targets).subspan(static_cast<std::size_t>(i * classes), static_cast<std::size_t>(classes));
      float sum = 0;
      for (float& p : row) sum += p = std::abs(p);
      for (float& p : row) p /= sum;
    }
    Settings settings = {{"label-smoothing", smoothing}};
    if (weighted) {
      std::vector<double> weights;
      for (const float w : uniform(name + "/weights", classes)) weights.push_back(std::abs(w));
      settings.set("class-weights", weights);
    }
    compare(name, x,
            nn::make_loss(nn::usual_loss(), settings)(tape_, x, upload(*backend_, targets, shape),
                                                      1.0f / static_cast<float>(rows)),
            static_cast<float>(rows));
  }
  struct Ignored {
    std::string name;
    Extents shape;
    float smoothing;
    std::int32_t ignored;
  };
  for (const auto& [name, shape, smoothing, ignored] :
       {Ignored{"cross-entropy-ignored", {7, 10}, 0, -100}, Ignored{"cross-entropy-ignored-class", {8, 5}, 0.1f, 2}}) {
    const nn::Var x = input(name, shape, 4.0f);
    auto labels = below<std::int32_t>(name + "/labels", shape[0], shape[1]);
    for (std::size_t i = 0; i < labels.size(); i += 3) labels[i] = ignored;
    const auto counted =
        static_cast<float>(std::ranges::count_if(labels, [&](auto label) { return label != ignored; }));
    compare(name, x,
            nn::cross_entropy(tape_, x, upload(*backend_, labels, nn::Shape{shape[0]}), 1.0f / counted,
                              {smoothing, ignored}),
            counted);
  }
}

}  // namespace
}  // namespace lockstep::parity
