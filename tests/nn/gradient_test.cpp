// Every differentiable operator of lockstep/nn/autograd/functions.h against central differences, on the device of
// make_gradient_backend().
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/error.h"
#include "tests/nn/gradient_check.h"
#include "tests/nn/operator_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST_F(Gradient, Linear) {
  for (const auto& [n, in, out] : {std::array<std::int64_t, 3>{1, 1, 1}, {3, 7, 5}, {17, 3, 1}, {2, 33, 17}}) {
    for (const bool with_bias : {true, false}) {
      const auto w = weights({out, in}, 1);
      const auto b = weights({out}, 2);
      std::vector<Parameter*> parameters = {w.get()};
      if (with_bias) parameters.push_back(b.get());
      expect_gradients({{random({n, in}, 3)}, parameters},
                       [&](Tape& tape, Inputs x) { return linear(tape, x[0], *w, with_bias ? b.get() : nullptr); });
    }
  }
}

TEST_F(Gradient, LinearWithRelu) {
  const auto w = parameter(random_halves(*backend, {9, 7}, 1));
  const auto b = parameter(random_halves(*backend, {9}, 2, 0.125f));
  expect_gradients({{random_halves(*backend, {5, 7}, 3)}, {w.get(), b.get()}},
                   [&](Tape& tape, Inputs x) { return linear(tape, x[0], *w, b.get(), Epilogue::kRelu); });
}

// 16 outputs, which devices may differentiate GELU of while they compute something else, and 5, which they may not.
// What reads the result: another product, an addition, or both.
TEST_F(Gradient, LinearWithGelu) {
  for (const std::int64_t out : {16, 5})
    for (const int readers : {1, 2, 3}) {
      const auto w = weights({out, 7}, 1), b = weights({out}, 2);
      const auto v = weights({out, out}, 4);
      expect_gradients({{random({2, 3, 7}, 3)}, {w.get(), b.get(), v.get()}}, [&](Tape& tape, Inputs x) {
        const Var h = linear(tape, x[0], *w, b.get(), Epilogue::kGelu);
        const Var y = linear(tape, h, *v, nullptr);
        return readers == 1 ? y : readers == 2 ? add(tape, h, y) : add(tape, y, add(tape, y, h));
      });
    }
}

// Devices may let their rows lie apart: for whoever reads them, for the loss, and for both.
TEST_F(Gradient, Logits) {
  const auto w = weights({5, 7}, 1), b = weights({5}, 2);
  const Tensor labels = backend->empty({2, 3}, DType::kI32);
  const std::vector<std::int32_t> numbers = {0, 4, 2, 1, 3, 4};
  backend->upload(std::as_bytes(std::span(numbers)), labels);
  const Differentiated inputs = {{random({2, 3, 7}, 3)}, {w.get(), b.get()}};
  expect_gradients(inputs, [&](Tape& tape, Inputs x) { return logits(tape, x[0], *w, b.get()); });
  expect_loss_gradients(inputs, 0.5, [&](Tape& tape, Inputs x) {
    return cross_entropy(tape, logits(tape, x[0], *w, b.get()), labels, 0.5f).value;
  });
  expect_gradients(inputs, [&](Tape& tape, Inputs x) {
    const Var y = logits(tape, x[0], *w, b.get());
    return add(tape, y, y);
  });
}

TEST_F(Gradient, LinearFrozen) {
  for (const bool freeze_weight : {true, false}) {
    const auto w = weights({4, 3}, 1), b = weights({4}, 2);
    (freeze_weight ? w : b)->set_requires_grad(false);
    expect_gradients({{random({5, 3}, 3)}, {w.get(), b.get()}},
                     [&](Tape& tape, Inputs x) { return linear(tape, x[0], *w, b.get()); });
  }
}

struct Geometry {
  Shape x;
  std::int64_t out;
  Window window;
  std::int64_t groups = 1;

  Shape w() const { return {out, window.kernel[0], window.kernel[1], x[3] / groups}; }
};

const std::vector<Geometry>& geometries() {
  static const std::vector<Geometry> all = {
      {{2, 5, 5, 3}, 4, {{3, 3}, {1, 1}, {1, 1}}},   // the usual one
      {{1, 7, 6, 2}, 3, {{3, 3}, {2, 2}, {0, 0}}},   // a column is left over
      {{2, 5, 7, 1}, 5, {{3, 3}, {2, 2}, {1, 1}}},   // one channel, as the first layer of a digits model
      {{3, 4, 4, 7}, 5, {{1, 1}, {1, 1}, {0, 0}}},   // pointwise
      {{1, 5, 3, 17}, 1, {{3, 1}, {1, 2}, {1, 0}}},  // nothing square
      {{1, 3, 3, 2}, 33, {{3, 3}, {1, 1}, {0, 0}}},  // one pixel is left
      {{1, 1, 1, 1}, 1, {{1, 1}, {1, 1}, {0, 0}}},    {{1, 2, 2, 16}, 16, {{3, 3}, {1, 1}, {1, 1}}},  // mostly padding
      {{2, 5, 4, 6}, 4, {{3, 3}, {1, 1}, {1, 1}}, 2},                                                 // in groups
      {{1, 6, 5, 3}, 6, {{3, 3}, {2, 2}, {1, 1}}, 3},  // depthwise, two filters of each channel
      {{2, 4, 3, 5}, 5, {{3, 1}, {1, 1}, {1, 0}}, 5},
  };
  return all;
}

TEST_F(Gradient, Conv2d) {
  for (const auto& g : geometries()) {
    for (const bool with_bias : {true, false}) {
      const auto w = weights(g.w(), 1);
      const auto b = weights({g.out}, 2);
      std::vector<Parameter*> parameters = {w.get()};
      if (with_bias) parameters.push_back(b.get());
      SCOPED_TRACE(to_string(g.x) + (with_bias ? " with bias" : ""));
      expect_gradients({{random(g.x, 3)}, parameters}, [&](Tape& tape, Inputs x) {
        return conv2d(tape, x[0], *w, with_bias ? b.get() : nullptr, g.window, Epilogue::kNone, g.groups);
      });
    }
  }
}

TEST_F(Gradient, Conv2dWithRelu) {
  for (const auto& g : geometries()) {
    const auto w = parameter(random_halves(*backend, g.w(), 1));
    const auto b = parameter(random_halves(*backend, {g.out}, 2, 0.125f));
    SCOPED_TRACE(to_string(g.x));
    for (const Epilogue epilogue : {Epilogue::kRelu, Epilogue::kRelu6})
      expect_gradients({{random_halves(*backend, g.x, 3)}, {w.get(), b.get()}}, [&](Tape& tape, Inputs x) {
        return conv2d(tape, x[0], *w, b.get(), g.window, epilogue, g.groups);
      });
  }
}

TEST_F(Gradient, Conv2dFrozen) {
  for (const bool freeze_weight : {true, false}) {
    const Window window = {{3, 3}, {1, 1}, {1, 1}};
    const auto w = weights({5, 3, 3, 2}, 1), b = weights({5}, 2);
    (freeze_weight ? w : b)->set_requires_grad(false);
    expect_gradients({{random({2, 4, 3, 2}, 3)}, {w.get(), b.get()}},
                     [&](Tape& tape, Inputs x) { return conv2d(tape, x[0], *w, b.get(), window); });
  }
}

TEST_F(Gradient, Conv2dMaxPool) {
  for (const Window& pool : {Window{{2, 2}, {2, 2}, {0, 0}}, Window{{3, 3}, {2, 2}, {1, 1}}})
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      for (const auto frozen : {0, 1, 2, 3}) {
        const auto w = weights({5, 3, 3, 2}, 1), b = weights({5}, 2);
        w->set_requires_grad((frozen & 1) == 0);
        b->set_requires_grad((frozen & 2) == 0);
        SCOPED_TRACE(fmt::format("kernel {} frozen {}", pool.kernel[0], frozen));
        expect_gradients({{shuffled_grid(*backend, {2, 5, 4, 2}, 3)}, {w.get(), b.get()}}, [&](Tape& tape, Inputs x) {
          return conv2d_max_pool(tape, x[0], *w, b.get(), {{3, 3}, {1, 1}, {1, 1}}, epilogue, pool);
        });
      }
}

const std::vector<Geometry>& poolings() {
  static const std::vector<Geometry> all = {
      {{2, 4, 6, 3}, 0, {{2, 2}, {2, 2}, {0, 0}}}, {{1, 7, 7, 5}, 0, {{3, 3}, {2, 2}, {1, 1}}},   // overlapping, padded
      {{1, 7, 6, 2}, 0, {{2, 2}, {2, 2}, {0, 0}}},                                                // a row is left over
      {{1, 8, 5, 1}, 0, {{3, 2}, {3, 2}, {0, 0}}}, {{1, 5, 5, 17}, 0, {{5, 5}, {1, 1}, {0, 0}}},  // the whole image
      {{2, 4, 4, 1}, 0, {{2, 2}, {3, 3}, {0, 0}}},  // gaps between windows
      {{1, 6, 5, 4}, 0, {{3, 3}, {1, 1}, {1, 1}}},
  };
  return all;
}

TEST_F(Gradient, AdaptiveAvgPool2d) {
  for (const Shape& shape : {Shape{2, 8, 8, 3}, Shape{1, 1, 2, 5}, Shape{2, 5, 9, 1}})
    expect_gradients({{random(shape, 1)}, {}},
                     [](Tape& tape, Inputs x) { return adaptive_avg_pool2d(tape, x[0], 3, 4); });
}

TEST_F(Gradient, Pool2dMax) {
  for (const auto& g : poolings()) {
    SCOPED_TRACE(to_string(g.x));
    expect_gradients({{shuffled_grid(*backend, g.x, 1)}, {}},
                     [&](Tape& tape, Inputs x) { return pool2d(tape, PoolKind::kMax, x[0], g.window); });
  }
}

TEST_F(Gradient, Pool2dAverage) {
  for (const auto& g : poolings()) {
    SCOPED_TRACE(to_string(g.x));
    expect_gradients({{random(g.x, 1)}, {}},
                     [&](Tape& tape, Inputs x) { return pool2d(tape, PoolKind::kAverage, x[0], g.window); });
  }
}

TEST_F(Gradient, BatchNorm) {
  for (const bool training : {true, false}) {
    for (const Shape& shape : {Shape{2, 1}, Shape{5, 3}, Shape{2, 3, 2, 7}, Shape{3, 2, 2, 16}, Shape{7, 33}}) {
      const std::int64_t channels = shape[shape.size() - 1];
      const auto gamma = weights({channels}, 1);
      const auto beta = weights({channels}, 2);
      const Tensor mean = random({channels}, 4), variance = backend->empty({channels});
      backend->pointwise().fill(variance, 0.7f);
      SCOPED_TRACE(to_string(shape) + (training ? " training" : " evaluation"));
      // Not so small a variance that the curvature shows: eps is large, and two rows lie at least 0.5 apart.
      Tensor x = random(shape, 3);
      if (shape[0] == 2 && shape.size() == 2) x = tensor_of(*backend, shape, {-0.6f, 0.9f});
      expect_gradients({{x}, {gamma.get(), beta.get()}}, [&](Tape& tape, Inputs in) {
        // The running statistics move in training, which no output depends on; copies keep evaluation's in place.
        const Tensor m = backend->empty({channels}), v = backend->empty({channels});
        backend->pointwise().copy(mean, m);
        backend->pointwise().copy(variance, v);
        return batch_norm(tape, in[0], *gamma, *beta,
                          {.running_mean = m, .running_variance = v, .momentum = 0.1, .eps = 0.1}, training);
      });
    }
  }
}

// Of values that lie away from 0, where some have no slope.
TEST_F(Gradient, UnaryFunctions) {
  for_cases(kUnaryCases, [&](const UnaryCase& each, auto, const char*) {
    for (const Shape& shape : {Shape{3}, Shape{2, 3, 3}}) {
      const Tensor x = shuffled_grid(*backend, shape, 1);
      backend->operators().forward(Affine{1.0f, each.middle}, x, x);
      expect_gradients({{x}, {}}, [&](Tape& tape, Inputs inputs) { return each.function(tape, inputs[0]); });
    }
  });
}

TEST_F(Gradient, BinaryFunctions) {
  for_cases(kBinaryCases, [&](const BinaryCase& each, auto, const char*) {
    const Tensor x = shuffled_grid(*backend, {4, 5}, 1), y = shuffled_grid(*backend, {4, 5}, 2);
    backend->operators().forward(Affine{1.0f, each.middle}, y, y);
    expect_gradients({{x, y}, {}},
                     [&](Tape& tape, Inputs inputs) { return each.function(tape, inputs[0], inputs[1]); });
    expect_gradients({{x}, {}},
                     [&](Tape& tape, Inputs inputs) { return each.function(tape, inputs[0], tape.input(y)); });
    expect_gradients({{y}, {}},
                     [&](Tape& tape, Inputs inputs) { return each.function(tape, tape.input(x), inputs[0]); });
  });
}

TEST_F(Gradient, ToF32) {
  expect_gradients({{random({2, 5, 3}, 1)}, {}}, [](Tape& tape, Inputs x) { return to_f32(tape, x[0]); });
}

TEST_F(Gradient, ToActivations) {
  expect_gradients({{random({2, 5, 3}, 1)}, {}}, [](Tape& tape, Inputs x) { return to_activations(tape, x[0]); });
}

TEST_F(Gradient, AddOfOneVariableTwice) {
  expect_gradients({{random({3, 7}, 1)}, {}}, [](Tape& tape, Inputs x) { return add(tape, x[0], x[0]); });
}

// The two arms of a residual connection get the same gradient tensor; neither may change it under the other.
TEST_F(Gradient, AddOfBranchesThatChangeTheirGradient) {
  const auto w = parameter(random_halves(*backend, {6, 6}, 1)), b = parameter(random_halves(*backend, {6}, 2, 0.125f));
  expect_gradients({{shuffled_grid(*backend, {3, 6}, 3)}, {}}, [&](Tape& tape, Inputs x) {
    return add(tape, relu(tape, x[0]), add(tape, x[0], relu(tape, x[0])));
  });
  expect_gradients({{random_halves(*backend, {3, 6}, 3)}, {w.get(), b.get()}}, [&](Tape& tape, Inputs x) {
    const Var h = linear(tape, x[0], *w, b.get(), Epilogue::kRelu);
    return add(tape, h, linear(tape, x[0], *w, b.get(), Epilogue::kRelu));
  });
}

TEST_F(Gradient, Flatten) {
  for (const Shape& shape : {Shape{2, 3, 5, 7}, Shape{2, 3, 3, 1}, Shape{3, 1, 1, 5}, Shape{2, 3, 4}, Shape{4, 6}})
    expect_gradients({{random(shape, 1)}, {}}, [](Tape& tape, Inputs x) { return flatten(tape, x[0]); });
}

TEST_F(Gradient, CrossEntropy) {
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 2}, {5, 10}, {3, 33}}) {
    std::vector<std::int32_t> classes;
    for (std::int64_t i = 0; i < n; ++i) classes.push_back(static_cast<std::int32_t>(i * 7 % k));
    const Tensor labels = backend->empty({n}, DType::kI32);
    backend->upload(std::as_bytes(std::span(classes)), labels);
    for (const float smoothing : {0.0f, 0.3f})
      expect_loss_gradients({{random({n, k}, 1)}, {}}, 0.25, [&](Tape& tape, Inputs x) {
        return cross_entropy(tape, x[0], labels, 0.25f, smoothing).value;
      });
  }
}

TEST_F(Gradient, MaximumOfEquals) {
  Tape tape(*backend);
  const Var x = tape.differentiable_input(tensor_of(*backend, {2}, {1, 2}));
  const Var y = tape.differentiable_input(tensor_of(*backend, {2}, {1, 3}));
  tape.backward(sum(tape, maximum(tape, x, y), 1.0f).value);
  EXPECT_EQ(values_of(*backend, tape.grad(x)), (std::vector<float>{0.5f, 0}));
  EXPECT_EQ(values_of(*backend, tape.grad(y)), (std::vector<float>{0.5f, 1}));
}

TEST_F(Gradient, ApplyOperators) {
  for_operators([&](const OperatorCase& each, const auto& op) {
    for (const Shape& shape : each.shapes)
      if (shape.count() <= 2000)
        expect_gradients({.inputs = {each.has_kinks ? numbers_apart(*backend, shape) : random(shape, 1)},
                          .parameters = {},
                          .step = each.has_kinks ? 2e-4 : 0.01},
                         [&](Tape& tape, Inputs x) { return apply(tape, x[0], op); });
  });
}
TEST_F(Gradient, Sum) {
  for (const Shape& shape : {Shape{3}, Shape{5, 300}})
    expect_loss_gradients({{random(shape, 1)}, {}}, 0.5,
                          [&](Tape& tape, Inputs x) { return sum(tape, x[0], 0.5f).value; });
}
// A penalty beside a cross entropy: what the cross entropy counts is counted, whatever the order.
TEST_F(Gradient, ASumOfLossesCountsWhatOneOfThemCounts) {
  Tape tape(*backend);
  const Var x = tape.differentiable_input(tensor_of(*backend, {3, 2}, {1, 2, 5, 3, 0, 4}));
  const std::int32_t numbers[] = {1, 0, 0};  // two of three are right
  const Tensor labels = backend->empty({3}, DType::kI32);
  backend->upload(std::as_bytes(std::span(numbers)), labels);
  const Loss entropy = cross_entropy(tape, x, labels, 0.5f), penalty = sum(tape, square(tape, x), 0.5f);
  const auto totals = [&](Var loss) { return values_of(*backend, loss.value()); };
  const float whole = totals(entropy.value)[0] + totals(penalty.value)[0];
  const Var first = add(tape, entropy.value, penalty.value), second = add(tape, penalty.value, entropy.value);
  EXPECT_EQ(totals(first), (std::vector<float>{whole, 2}));
  EXPECT_EQ(totals(second), (std::vector<float>{whole, 2}));
  EXPECT_EQ(totals(add(tape, first, penalty.value))[1], 2);
  const Var none = add(tape, penalty.value, penalty.value);
  EXPECT_TRUE(std::isnan(totals(none)[1]));
  EXPECT_EQ(totals(add(tape, none, entropy.value))[1], 2);
  EXPECT_EQ(totals(add(tape, entropy.value, entropy.value))[1], 4);
  tape.backward(first);
}

// A value that several read, on its way to a loss: the one of a variational autoencoder.
TEST_F(Gradient, OwnLoss) {
  const auto divergence = [](Tape& tape, Var mean, Var logarithm) {
    const Var inside = sub(tape, add(tape, square(tape, mean), exp(tape, logarithm)), affine(tape, logarithm, 1, 1));
    return sum(tape, affine(tape, sum_last(tape, inside), 0.5f), 0.25f).value;
  };
  const Tensor mean = random({3, 4}, 1), logarithm = random({3, 4}, 2);
  expect_loss_gradients({{mean, logarithm}, {}}, 0.25,
                        [&](Tape& tape, Inputs x) { return divergence(tape, x[0], x[1]); });
}

TEST_F(Gradient, SquaredError) {
  for (const Shape& shape : {Shape{3}, Shape{5, 3}, Shape{2, 3, 2, 1}}) {
    const Tensor target = random(shape, 2);
    expect_loss_gradients({{random(shape, 1)}, {}}, 0.5,
                          [&](Tape& tape, Inputs x) { return squared_error(tape, x[0], target, 0.5f).value; });
  }
}

TEST_F(Gradient, LinearOverAxes) {
  const auto w = weights({5, 3}, 1), b = weights({5}, 2);
  expect_gradients({{random({2, 4, 3}, 3)}, {w.get(), b.get()}},
                   [&](Tape& tape, Inputs x) { return linear(tape, x[0], *w, b.get()); });
}

TEST_F(Gradient, LayerNorm) {
  for (const Shape& shape : {Shape{1, 2}, {3, 16}, {2, 5, 33}, {70, 2}})
    for (const auto frozen : {0, 1, 2, 3})
      for (const bool with_bias : {true, false}) {
        if (frozen != 0 && shape.count() > 200) continue;  // each element takes two forwards
        const Shape features = {shape[shape.size() - 1]};
        const auto gamma = weights(features, 1);
        const auto beta = weights(features, 2);
        gamma->set_requires_grad((frozen & 1) == 0);
        beta->set_requires_grad((frozen & 2) == 0);
        std::vector<Parameter*> parameters = {gamma.get()};
        if (with_bias) parameters.push_back(beta.get());
        SCOPED_TRACE(to_string(shape));
        expect_gradients({.inputs = {random(shape, 3)}, .parameters = parameters, .step = 1e-3},
                         [&](Tape& tape, Inputs x) {
                           return layer_norm(tape, x[0], *gamma, with_bias ? beta.get() : nullptr, 0.1);
                         });
      }
}

// The same bits as of the two operators one after the other, on every device.
TEST_F(Gradient, AddLayerNorm) {
  for (const Shape& shape : {Shape{0, 3}, {1, 2}, {3, 16}, {2, 5, 33}, {2, 1025}}) {
    SCOPED_TRACE(to_string(shape));
    const Shape features = {shape[shape.size() - 1]};
    const auto gamma = weights(features, 1);
    const auto beta = weights(features, 2);
    const auto run = [&](bool at_once) {
      gamma->clear_grad();
      beta->clear_grad();
      Tape tape(*backend);
      const Var x = tape.differentiable_input(random(shape, 3));
      const Var y = tape.differentiable_input(random(shape, 4));
      SumAndNorm made;
      if (at_once) {
        made = add_layer_norm(tape, x, y, *gamma, beta.get(), 0.1);
      } else {
        made.sum = add(tape, x, y);
        made.norm = layer_norm(tape, made.sum, *gamma, beta.get(), 0.1);
      }
      const Var out = add(tape, made.sum, gelu(tape, made.norm));
      std::vector<std::vector<float>> all = {values_of(*backend, made.sum.value()),
                                             values_of(*backend, made.norm.value())};
      tape.backward(out, random(shape, 5));
      for (const Tensor& grad : {tape.grad(x), tape.grad(y), gamma->gradient(), beta->gradient()})
        all.push_back(values_of(*backend, grad));
      return all;
    };
    EXPECT_EQ(run(true), run(false));
    if (shape.count() == 0 || shape.count() > 500) continue;  // each element takes two forwards
    expect_gradients(
        {.inputs = {random(shape, 3), random(shape, 4)}, .parameters = {gamma.get(), beta.get()}, .step = 1e-3},
        [&](Tape& tape, Inputs x) {
          const SumAndNorm made = add_layer_norm(tape, x[0], x[1], *gamma, beta.get(), 0.1);
          return add(tape, made.sum, made.norm);
        });
  }
}

TEST_F(Gradient, Dropout) {
  const std::array<std::int64_t, 3> state = {7, 3, 5};
  const Tensor numbers = backend->empty({3}, DType::kI64);
  backend->upload(std::as_bytes(std::span(state)), numbers);
  for (const Shape& shape : {Shape{3, 16}, {2, 3, 7}, {1, 3}})
    expect_gradients({{random(shape, 3)}, {}}, [&](Tape& tape, Inputs x) {
      tape.set_dropout_state(numbers);
      return dropout(tape, x[0], 0.4, 11);
    });
}

TEST_F(Gradient, Embedding) {
  const std::array<std::int32_t, 6> numbers = {4, 0, 4, 2, 4, 0};
  const Tensor tokens = backend->empty({2, 3}, DType::kI32);
  backend->upload(std::as_bytes(std::span(numbers)), tokens);
  const auto table = weights({5, 19}, 1);
  expect_gradients({{}, {table.get()}}, [&](Tape& tape, Inputs) { return embedding(tape, tokens, *table); });
  // Twice on one tape, as a table that is also the last layer: the second contribution is added.
  expect_gradients({{}, {table.get()}},
                   [&](Tape& tape, Inputs) { return linear(tape, embedding(tape, tokens, *table), *table, nullptr); });
}

TEST_F(Gradient, AddPositions) {
  const auto table = weights({6, 5}, 1);
  for (const std::int64_t first : {0, 2})
    for (const bool frozen : {true, false}) {
      table->set_requires_grad(!frozen);
      expect_gradients({{random({2, 4, 5}, 3)}, {table.get()}},
                       [&](Tape& tape, Inputs x) { return add_positions(tape, x[0], *table, first); });
    }
}

TEST_F(Gradient, CausalAttention) {
  struct Case {
    std::int64_t batch, tokens, heads, width;
  };
  for (const auto& c : {Case{1, 1, 1, 1}, Case{2, 5, 3, 4}, Case{1, 9, 1, 16}}) {
    SCOPED_TRACE(c.tokens);
    expect_gradients({{random({c.batch, c.tokens, 3 * c.heads * c.width}, 3)}, {}},
                     [&](Tape& tape, Inputs x) { return causal_attention(tape, x[0], c.heads); });
  }
}

TEST_F(Gradient, Attention) {
  const std::array<std::int32_t, 3> lengths = {3, 5, 0};
  AttentionOptions options{.causal = false, .lengths = backend->empty({3}, DType::kI32)};
  backend->upload(std::as_bytes(std::span(lengths)), options.lengths);
  expect_gradients({{random({3, 5, 24}, 3)}, {}},
                   [&](Tape& tape, Inputs x) { return attention(tape, x[0], 2, options); });
  const auto part = [&](std::uint64_t seed) { return random({3, 5, 8}, seed); };
  expect_gradients({{part(3), part(4), part(5)}, {}},
                   [&](Tape& tape, Inputs x) { return attention(tape, x[0], x[1], x[2], 2, options); });
}

TEST_F(Gradient, CausalAttentionWithDropout) {
  const std::array<std::int64_t, 3> state = {7, 3, 40};
  const Tensor numbers = backend->empty({3}, DType::kI64);
  backend->upload(std::as_bytes(std::span(state)), numbers);
  struct Case {
    std::int64_t batch, tokens, heads, width;
  };
  // The last one is longer than a tile of queries, and small otherwise: each element takes two passes.
  for (const auto& c : {Case{1, 1, 1, 1}, Case{2, 5, 2, 3}, Case{1, 67, 1, 1}}) {
    SCOPED_TRACE(c.tokens);
    expect_gradients({{random({c.batch, c.tokens, 3 * c.heads * c.width}, 3)}, {}}, [&](Tape& tape, Inputs x) {
      tape.set_dropout_state(numbers);
      return causal_attention(tape, x[0], c.heads, 0.4, 11);
    });
  }
}

TEST_F(Gradient, IndexSelect) {
  const std::array<std::int32_t, 4> values = {5, 0, 3, 5};
  const Tensor indices = backend->empty({4}, DType::kI32);
  backend->upload(std::as_bytes(std::span(values)), indices);
  expect_gradients({{random({2, 3, 7}, 3)}, {}},
                   [&](Tape& tape, Inputs x) { return index_select(tape, x[0], indices); });
}

TEST_F(Gradient, TakePositions) {
  const Tensor positions = backend->empty({3, 2}, DType::kI32);
  constexpr std::array<std::int32_t, 6> kPositions = {0, 3, 1, 1, 2, 0};  // one twice
  backend->upload(std::as_bytes(std::span(kPositions)), positions);
  expect_gradients({{random({3, 4, 5}, 4)}, {}},
                   [&](Tape& tape, Inputs x) { return take_positions(tape, x[0], positions); });
}

TEST_F(Gradient, TakePosition) {
  expect_gradients({{random({3, 4, 5}, 4)}, {}}, [&](Tape& tape, Inputs x) { return take_position(tape, x[0], 2); });
}

}  // namespace
}  // namespace lockstep::nn
