#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/nn/gradient_check.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class TapeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Parameter> parameter(const Shape& shape, std::uint64_t seed) {
    auto made = std::make_unique<Parameter>(*backend, shape);
    backend->pointwise().copy(random_tensor(*backend, shape, seed), made->value());
    return made;
  }
  std::vector<float> gradient_of(const Parameter& p) {
    EXPECT_TRUE(p.has_gradient());
    return values_of(p.gradient());
  }
  void count_ready(Parameter& p, int& counter) {
    p.on_ready = [&counter] { ++counter; };
  }
  Loss loss_of(Var y) { return squared_error(tape, y, target, 0.5f); }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Tensor x = random_tensor(*backend, {3, 4}, 1), target = random_tensor(*backend, {3, 4}, 2);
  Tape tape{*backend};
};

// Calls `during` when backward comes by.
class ProbeNode final : public Node {
 public:
  ProbeNode(Var output, Var x, std::function<void()> during) : Node(output), x_(x), during_(std::move(during)) {}
  void backward(Tape& tape) override {
    during_();
    tape.contribute(x_, tape.grad(output()));
  }

 private:
  Var x_;
  std::function<void()> during_;
};

Var probe(Tape& tape, Var x, std::function<void()> during) {
  const Var y = tape.make_var(x.value(), x.needs_grad());
  tape.record<ProbeNode>(y, x, std::move(during));
  return y;
}

TEST_F(TapeTest, SharedWeightsGetTheSumOfTheirGradients) {
  const auto shared = parameter({4, 4}, 3);
  expect_gradients(*backend, {{x}, {shared.get()}}, [&](Tape& t, std::span<const Var> in) {
    return linear(t, linear(t, in[0], *shared, nullptr), *shared, nullptr);
  });
  const auto image = parameter({2, 3, 3, 2}, 4);
  const Window same = {{3, 3}, {1, 1}, {1, 1}};
  expect_gradients(*backend, {{random_tensor(*backend, {1, 3, 4, 2}, 5)}, {image.get()}},
                   [&](Tape& t, std::span<const Var> in) {
                     return conv2d(t, conv2d(t, in[0], *image, nullptr, same), *image, nullptr, same);
                   });
  const auto gamma = parameter({4}, 6), beta = parameter({4}, 7);
  const Tensor mean = backend->zeros({4}), variance = backend->zeros({4});
  const BatchNormState state = {.running_mean = mean, .running_variance = variance, .momentum = 0.0, .eps = 0.1};
  expect_gradients(*backend, {{x}, {gamma.get(), beta.get()}}, [&](Tape& t, std::span<const Var> in) {
    return batch_norm(t, batch_norm(t, in[0], *gamma, *beta, state, true), *gamma, *beta, state, true);
  });
}

TEST_F(TapeTest, GradientsAccumulateUntilCleared) {
  const auto w = parameter({4, 4}, 3), b = parameter({4}, 4);
  const auto pass = [&] {
    tape.backward(loss_of(linear(tape, tape.input(x), *w, b.get())).value);
    tape.reset();
  };
  pass();
  const auto once = gradient_of(*w), once_b = gradient_of(*b);
  pass();
  const auto twice = gradient_of(*w), twice_b = gradient_of(*b);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(twice[i], 2 * once[i], 1e-5f);
  for (std::size_t i = 0; i < once_b.size(); ++i) EXPECT_NEAR(twice_b[i], 2 * once_b[i], 1e-5f);
  w->clear_grad();
  EXPECT_FALSE(w->has_gradient());
  pass();
  EXPECT_EQ(gradient_of(*w), once);
  EXPECT_NE(gradient_of(*b), once_b);
}

TEST_F(TapeTest, BoundGradientsAreWrittenInPlace) {
  const auto w = parameter({4, 4}, 3);
  std::vector<float> arena(32, 99.0f);
  w->bind_gradient(Tensor::view_of(arena.data() + 8, {4, 4}));
  EXPECT_FALSE(w->has_gradient());
  tape.backward(loss_of(linear(tape, tape.input(x), *w, nullptr)).value);
  EXPECT_EQ(w->gradient().f32(), arena.data() + 8);
  EXPECT_NE(arena[8], 99.0f);
  EXPECT_NE(arena[23], 99.0f);
  EXPECT_EQ(arena[7], 99.0f);
  EXPECT_EQ(arena[24], 99.0f);
  EXPECT_THROW(w->bind_gradient(Tensor::view_of(arena.data(), {16})), UsageError);
}

TEST_F(TapeTest, ReadyComesOnceAndAfterTheLastContribution) {
  const auto shared = parameter({4, 4}, 3), bias = parameter({4}, 4);
  std::vector<float> at_ready;
  int ready = 0, bias_ready = 0;
  shared->on_ready = [&] {
    ++ready;
    at_ready = gradient_of(*shared);
  };
  count_ready(*bias, bias_ready);
  for (int pass = 1; pass <= 3; ++pass) {
    shared->clear_grad();
    bias->clear_grad();
    bool between = false;
    Var h = linear(tape, tape.input(x), *shared, nullptr);
    h = probe(tape, h, [&] {
      between = true;
      EXPECT_EQ(ready, pass - 1) << "ready before its first use was walked";
      EXPECT_EQ(bias_ready, pass) << "the last layer's bias is not ready yet";
    });
    tape.backward(loss_of(linear(tape, h, *shared, bias.get())).value);
    EXPECT_TRUE(between);
    EXPECT_EQ(ready, pass);
    EXPECT_EQ(bias_ready, pass);
    EXPECT_EQ(at_ready, gradient_of(*shared));
    tape.reset();
  }
}

TEST_F(TapeTest, ReadyComesBeforeTheInputsGradient) {
  const auto w = parameter({4, 4}, 3);
  const Var input = tape.differentiable_input(x);
  int ready = 0;
  w->on_ready = [&] {
    ++ready;
    EXPECT_TRUE(w->has_gradient());
    EXPECT_FALSE(tape.grad(input).defined()) << "a collective could have travelled meanwhile";
  };
  tape.backward(loss_of(linear(tape, input, *w, nullptr)).value);
  EXPECT_EQ(ready, 1);
  EXPECT_TRUE(tape.grad(input).defined());
}

TEST_F(TapeTest, UnusedParametersAreNeverReady) {
  const auto used = parameter({4, 4}, 3), dead_end = parameter({4, 4}, 4), frozen = parameter({4, 4}, 5),
             elsewhere = parameter({4, 4}, 6);
  frozen->set_requires_grad(false);
  int used_ready = 0, dead_ready = 0, frozen_ready = 0, elsewhere_ready = 0;
  count_ready(*used, used_ready);
  count_ready(*dead_end, dead_ready);
  count_ready(*frozen, frozen_ready);
  count_ready(*elsewhere, elsewhere_ready);
  const auto pass = [&](bool use_dead_end) {
    const Var h = linear(tape, tape.input(x), *used, nullptr);
    const Var other = linear(tape, h, *dead_end, nullptr);  // nobody looks at it, or its sum
    const Var y = linear(tape, use_dead_end ? add(tape, h, other) : h, *frozen, nullptr);
    linear(tape, y, *dead_end, nullptr);
    tape.backward(loss_of(y).value);
    tape.reset();
  };
  pass(false);
  EXPECT_EQ(used_ready, 1);
  EXPECT_EQ(dead_ready, 0);
  EXPECT_FALSE(dead_end->has_gradient());
  EXPECT_EQ(frozen_ready, 0);
  EXPECT_EQ(elsewhere_ready, 0);
  // One of two uses counts; the other is a dead end.
  pass(true);
  EXPECT_EQ(used_ready, 2);
  EXPECT_EQ(dead_ready, 1);
  EXPECT_TRUE(dead_end->has_gradient());
  // A gradient of an earlier pass is none of this one.
  pass(false);
  EXPECT_EQ(used_ready, 3);
  EXPECT_EQ(dead_ready, 1);
  EXPECT_EQ(frozen_ready, 0);
}

TEST_F(TapeTest, AnExceptionInBackwardLeavesAUsableTape) {
  const auto first = parameter({4, 4}, 3), last = parameter({4, 4}, 4), last_bias = parameter({4}, 5);
  const auto in_use_before = backend->allocator().stats().bytes_in_use;
  int first_ready = 0, bias_ready = 0;
  count_ready(*first, first_ready);
  count_ready(*last_bias, bias_ready);
  bool fail_in_node = true, fail_in_ready = false;
  last->on_ready = [&] {
    if (fail_in_ready) throw std::runtime_error("ready");
  };
  const auto pass = [&] {
    Var h = linear(tape, tape.input(x), *first, nullptr);
    h = probe(tape, h, [&] {
      if (fail_in_node) throw std::runtime_error("node");
    });
    tape.backward(loss_of(linear(tape, h, *last, last_bias.get())).value);
  };
  EXPECT_THROW(pass(), std::runtime_error);
  tape.reset();
  EXPECT_EQ(first_ready, 0);
  fail_in_node = false;
  fail_in_ready = true;
  EXPECT_THROW(pass(), std::runtime_error);
  tape.reset();
  fail_in_ready = false;
  bias_ready = 0;
  for (int i = 1; i <= 2; ++i) {
    pass();
    tape.reset();
    EXPECT_EQ(first_ready, i);
    EXPECT_EQ(bias_ready, i);
  }
  // Only the three gradients are left.
  EXPECT_EQ(backend->allocator().stats().bytes_in_use, in_use_before + 3 * 256);
}

TEST_F(TapeTest, ResetWithoutBackwardClearsUses) {
  const auto w = parameter({4, 4}, 3);
  int ready = 0;
  count_ready(*w, ready);
  linear(tape, tape.input(x), *w, nullptr);
  tape.reset();
  tape.backward(loss_of(linear(tape, tape.input(x), *w, nullptr)).value);
  EXPECT_EQ(ready, 1);
}

TEST_F(TapeTest, TheHookRunsAfterEveryNode) {
  const auto w = parameter({4, 4}, 3);
  int calls = 0;
  tape.set_node_hook([&] { ++calls; });
  tape.backward(loss_of(relu(tape, linear(tape, tape.input(x), *w, nullptr))).value);
  EXPECT_EQ(calls, 3);  // linear, relu, loss
}

struct Listens final : BackwardListener {
  void backward_begins() override { told += 'b'; }
  void node_walked() override { told += 'n'; }
  void backward_ended() override { told += 'e'; }
  std::string told;
};

TEST_F(TapeTest, AListenerHearsOfOneBackward) {
  const auto w = parameter({4, 4}, 3);
  Listens listener;
  const auto pass = [&] { return loss_of(linear(tape, tape.input(x), *w, nullptr)).value; };
  tape.set_listener(&listener);
  tape.backward(pass());
  EXPECT_EQ(listener.told, "bnne");
  tape.reset();
  tape.backward(pass());
  tape.set_listener(&listener);
  tape.reset();  // and forgets it
  EXPECT_TRUE(!w->awaits_backward());
  const Var root = pass();
  EXPECT_TRUE(w->awaits_backward());
  tape.backward(root);
  EXPECT_EQ(listener.told, "bnne");
}

TEST_F(TapeTest, BackwardNeedsSomethingToWalk) {
  const auto w = parameter({4, 4}, 3);
  EXPECT_THROW(tape.backward(loss_of(tape.input(x)).value), UsageError);
  const Loss loss = loss_of(linear(tape, tape.input(x), *w, nullptr));
  tape.backward(loss.value);
  EXPECT_THROW(tape.backward(loss.value), UsageError);
  tape.reset();
  tape.set_recording(false);
  EXPECT_THROW(tape.backward(loss_of(linear(tape, tape.input(x), *w, nullptr)).value), UsageError);
}

TEST_F(TapeTest, TotalsOutliveBackward) {
  const auto w = parameter({4, 4}, 3);
  const Loss loss = loss_of(linear(tape, tape.input(x), *w, nullptr));
  const float before = loss.totals().f32()[0];
  tape.backward(loss.value);
  EXPECT_EQ(loss.totals().f32()[0], before);
}

TEST_F(TapeTest, MemoryIsReleasedDuringBackward) {
  constexpr std::int64_t kSamples = 4096;
  const Tensor wide = random_tensor(*backend, {kSamples, 4}, 1),
               wide_target = random_tensor(*backend, {kSamples, 4}, 2);
  std::vector<std::unique_ptr<Parameter>> weights;
  for (std::uint64_t i = 0; i < 8; ++i) weights.push_back(parameter({4, 4}, i));
  std::size_t at_first_layer = 0;
  Var h = tape.input(wide);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    h = linear(tape, h, *weights[i], nullptr);
    if (i == 0) h = probe(tape, h, [&] { at_first_layer = backend->allocator().stats().bytes_in_use; });
  }
  const Loss loss = squared_error(tape, h, wide_target, 1.0f);
  h = Var();
  const std::size_t after_forward = backend->allocator().stats().bytes_in_use;
  tape.backward(loss.value);
  const std::size_t activation = kSamples * 4 * sizeof(float);
  // Of nine activations and a gradient, one of each is left.
  EXPECT_LE(at_first_layer + 6 * activation, after_forward);
}

TEST_F(TapeTest, EvaluationRecordsNothing) {
  const auto w = parameter({4, 4}, 3);
  tape.set_recording(false);
  const Loss loss = loss_of(linear(tape, tape.input(x), *w, nullptr));
  EXPECT_FALSE(loss.value.needs_grad());
  EXPECT_GT(loss.totals().f32()[0], 0.0f);
}

TEST_F(TapeTest, ShapesThatDoNotFitAreUsageErrors) {
  const auto w = parameter({4, 5}, 3), v = parameter({2, 3, 3, 2}, 4), gamma = parameter({3}, 5),
             beta = parameter({3}, 6);
  const Tensor statistics = backend->zeros({3});
  const BatchNormState state = {.running_mean = statistics, .running_variance = statistics};
  const Var in = tape.input(x), image = tape.input(random_tensor(*backend, {2, 5, 5, 3}, 7));
  const Window same = {{3, 3}, {1, 1}, {1, 1}};
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.line();
    }
    return "no UsageError";
  };
  const auto expect_says = [&](const std::string& text, const auto& call) {
    EXPECT_NE(message(call).find(text), std::string::npos) << message(call);
  };
  expect_says("Linear with a weight of [4, 5] was given [3, 4]", [&] { linear(tape, in, *w, nullptr); });
  expect_says("was given [2, 5, 5, 3]", [&] { linear(tape, image, *w, nullptr); });
  expect_says("Conv2d with a weight of [2, 3, 3, 2] was given [2, 5, 5, 3]",
              [&] { conv2d(tape, image, *v, nullptr, same); });
  expect_says("[3, 4]", [&] { conv2d(tape, in, *v, nullptr, same); });
  expect_says("[3, 4]", [&] { pool2d(tape, PoolKind::kMax, in, same); });
  expect_says("does not fit", [&] { pool2d(tape, PoolKind::kMax, image, {{6, 6}, {1, 1}, {0, 0}}); });
  expect_says("half of the window", [&] { pool2d(tape, PoolKind::kMax, image, {{2, 2}, {1, 1}, {2, 2}}); });
  expect_says("BatchNorm over 3 channels was given [3, 4]", [&] { batch_norm(tape, in, *gamma, *beta, state, true); });
  const Var one = tape.input(random_tensor(*backend, {1, 3}, 8));
  expect_says("cannot train on [1, 3]", [&] { batch_norm(tape, one, *gamma, *beta, state, true); });
  EXPECT_NO_THROW(batch_norm(tape, one, *gamma, *beta, state, false));
  expect_says("add of [3, 4] and [1, 3]", [&] { add(tape, in, one); });
  expect_says("flatten was given [24]", [&] { flatten(tape, tape.input(random_tensor(*backend, {24}, 9))); });
  Tensor labels = backend->empty({3}, DType::kI32);
  for (int i = 0; i < 3; ++i) labels.data<std::int32_t>()[i] = i + 2;
  expect_says("label 4 of sample 2 in a batch with 4 classes", [&] { cross_entropy(tape, in, labels, 1.0f); });
  labels.data<std::int32_t>()[0] = -1;
  expect_says("label -1 of sample 0", [&] { cross_entropy(tape, in, labels, 1.0f); });
  expect_says("labels [3]", [&] { cross_entropy(tape, one, labels, 1.0f); });
  expect_says("squared error of [1, 3] against [3, 4]", [&] { squared_error(tape, one, x, 1.0f); });
  tape.reset();
}

// A parameter that gets the memory of one that is gone must not get its packed weights.
TEST_F(TapeTest, PackedWeightsDieWithTheirParameter) {
  const Tensor image = random_tensor(*backend, {1, 4, 4, 16}, 1);
  const Window same = {{3, 3}, {1, 1}, {1, 1}};
  const auto run = [&](std::uint64_t seed, const float** place) {
    const auto w = parameter({16, 3, 3, 16}, seed);
    *place = w->value().f32();
    const Var y = conv2d(tape, tape.input(image), *w, nullptr, same);
    const auto values = values_of(y.value());
    tape.reset();
    return values;
  };
  const float *first = nullptr, *second = nullptr;
  const auto a = run(1, &first), b = run(2, &second);
  ASSERT_EQ(first, second) << "the test needs the memory to be reused";
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace lockstep::nn
