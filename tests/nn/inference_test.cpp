// Evaluation: what generation computes step by step is what forward() computes at once, normalisations within
// convolutions change nothing, and siblings of a backend see the same weights. On the device of
// make_gradient_backend().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "nn/models/models.h"
#include "tests/nn/gradient_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using ::testing::HasSubstr;

class Inference : public ::testing::Test {
 protected:
  std::unique_ptr<Module> model(const ModelSpec& spec, std::uint64_t seed = 1) {
    Generator generator(seed);
    Context context{*backend, generator};
    auto made = make_model(context, spec);
    // Normalisations that do something, and values that are no round numbers.
    std::uint64_t next = 100;
    for (const auto& named : made->named_parameters())
      if (named.parameter->value().shape().size() == 1) nudge(named.parameter->value(), 0.2f, ++next);
    for (const auto& named : made->named_buffers())
      if (named.tensor->dtype() == DType::kF32) nudge(*named.tensor, 0.3f, ++next);
    for (const auto& named : made->named_parameters()) named.parameter->changed();
    made->train(false);
    return made;
  }
  std::unique_ptr<Module> gpt(std::int64_t context = 12) {
    return model({.name = "gpt",
                  .sample_shape = {context},
                  .classes = 11,
                  .gpt = {.layers = 3, .heads = 2, .width = 16, .context = context}});
  }
  void nudge(const Tensor& tensor, float by, std::uint64_t seed) {
    auto values = values_of(*backend, tensor);
    const auto noise = values_of(*backend, random_tensor(*backend, tensor.shape(), seed));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += by * noise[i];
    backend->upload(std::as_bytes(std::span(values)), tensor);
  }
  Tensor tokens_of(const Shape& shape, const std::vector<std::int32_t>& numbers) {
    Tensor made = backend->empty(shape, DType::kI32);
    backend->upload(std::as_bytes(std::span(numbers)), made);
    return made;
  }
  static std::vector<float> forward(Backend& on, Module& module, const Tensor& x) {
    Tape tape(on);
    tape.set_recording(false);
    return values_of(on, module.forward(tape, tape.input(x)).value());
  }
  static void expect_near(const std::vector<float>& a, const std::vector<float>& b, float tolerance = 1e-4f) {
    ASSERT_EQ(a.size(), b.size());
    float largest = 0, worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::abs(b[i]));
      worst = std::max(worst, std::abs(a[i] - b[i]));
    }
    EXPECT_GT(largest, 0);
    EXPECT_LE(worst, tolerance * largest);
  }
  static const LanguageModel& language(const std::unique_ptr<Module>& module) {
    return dynamic_cast<const LanguageModel&>(*module);
  }

  std::unique_ptr<Backend> backend = make_gradient_backend();
};

TEST_F(Inference, TokensOneByOneAndInAnyPiecesAreAsAllAtOnce) {
  const auto module = gpt();
  const std::vector<std::int32_t> numbers = {3, 1, 4, 1, 5, 9, 2, 6, 5, 10, 0, 7};
  const auto all = forward(*backend, *module, tokens_of({1, 12}, numbers));
  for (const std::vector<std::int64_t>& pieces :
       {std::vector<std::int64_t>(12, 1), {12}, {7, 1, 1, 3}, {1, 11}, {5, 5, 2}}) {
    Tape tape(*backend);
    tape.set_recording(false);
    const auto memory = language(module).begin(tape, 1, 12);
    std::int64_t at = 0;
    for (const std::int64_t piece : pieces) {
      const Tensor given = tokens_of({1, piece}, {numbers.begin() + at, numbers.begin() + at + piece});
      const Tensor logits = language(module).next(tape, given, *memory).value();
      at += piece;
      EXPECT_EQ(memory->seen(), at);
      ASSERT_EQ(logits.shape(), (Shape{1, 11}));
      expect_near(values_of(*backend, logits), {all.begin() + (at - 1) * 11, all.begin() + at * 11});
      tape.reset();
    }
  }
}

TEST_F(Inference, SeveralTextsAtOnce) {
  const auto module = gpt();
  const auto all = forward(*backend, *module, tokens_of({2, 4}, {1, 2, 3, 4, 10, 9, 8, 7}));
  Tape tape(*backend);
  tape.set_recording(false);
  const auto memory = language(module).begin(tape, 2, 5);
  static_cast<void>(language(module).next(tape, tokens_of({2, 3}, {1, 2, 3, 10, 9, 8}), *memory));
  const auto last = values_of(*backend, language(module).next(tape, tokens_of({2, 1}, {4, 7}), *memory).value());
  expect_near({last.begin(), last.begin() + 11}, {all.begin() + 33, all.begin() + 44});
  expect_near({last.begin() + 11, last.end()}, {all.begin() + 77, all.end()});
}

TEST_F(Inference, ThereIsOnlySoMuchRoom) {
  const auto module = gpt(6);
  EXPECT_EQ(language(module).positions(), 6);
  EXPECT_EQ(language(module).vocabulary(), 11);
  Tape tape(*backend);
  tape.set_recording(false);
  EXPECT_THROW(language(module).begin(tape, 1, 7), UsageError);
  EXPECT_THROW(language(module).begin(tape, 0, 3), UsageError);
  const auto memory = language(module).begin(tape, 1, 4);
  static_cast<void>(language(module).next(tape, tokens_of({1, 3}, {1, 2, 3}), *memory));
  EXPECT_THROW(language(module).next(tape, tokens_of({1, 2}, {1, 2}), *memory), UsageError);
  EXPECT_THROW(language(module).next(tape, tokens_of({2, 1}, {1, 2}), *memory), UsageError);
  static_cast<void>(language(module).next(tape, tokens_of({1, 1}, {1}), *memory));
  EXPECT_EQ(memory->seen(), 4);
}

TEST_F(Inference, NormalisationsBecomePartOfConvolutions) {
  for (const char* name : {"resnet18", "resnet50", "resnet18-cifar"}) {
    SCOPED_TRACE(name);
    const ModelSpec spec{.name = name, .sample_shape = {32, 32, 3}, .classes = 7};
    const auto plain = model(spec), fused = model(spec);
    fused->fuse();
    const Tensor x = random_tensor(*backend, {2, 32, 32, 3}, 5);
    expect_near(forward(*backend, *fused, x), forward(*backend, *plain, x));
    fused->fuse();  // changes nothing
    expect_near(forward(*backend, *fused, x), forward(*backend, *plain, x));
    EXPECT_THROW(fused->train(true), UsageError);
    EXPECT_NO_THROW(fused->train(false));
    EXPECT_NO_THROW(plain->train(true));
  }
}

TEST_F(Inference, SequentialsAreFusedToo) {
  const auto make = [&] {
    Generator generator(3);
    Context context{*backend, generator};
    auto made = std::make_unique<Sequential>();
    made->then(std::make_unique<Conv2d>(context, 3, 4, Window{{3, 3}, {1, 1}, {1, 1}}))
        .then(std::make_unique<BatchNorm>(context, 4))
        .then(std::make_unique<ReLU>())
        .then(std::make_unique<BatchNorm>(context, 4));  // nothing to be part of
    made->train(false);
    nudge(*made->named_buffers()[0].tensor, 1.0f, 8);
    nudge(*made->named_buffers()[1].tensor, 0.5f, 9);
    return made;
  };
  const auto plain = make(), fused = make();
  fused->fuse();
  const Tensor x = random_tensor(*backend, {2, 5, 5, 3}, 6);
  expect_near(forward(*backend, *fused, x), forward(*backend, *plain, x));
}

// Dropout and the batch's statistics are training's alone, and nothing of the model moves.
TEST_F(Inference, EvaluationChangesNothing) {
  const auto resnet = model({.name = "resnet18", .sample_shape = {32, 32, 3}, .classes = 3});
  std::vector<std::vector<float>> before;
  for (const auto& named : resnet->named_buffers())
    if (named.tensor->dtype() == DType::kF32) before.push_back(values_of(*backend, *named.tensor));
  const Tensor x = random_tensor(*backend, {1, 32, 32, 3}, 5), y = random_tensor(*backend, {2, 32, 32, 3}, 6);
  const auto alone = forward(*backend, *resnet, x);
  static_cast<void>(forward(*backend, *resnet, y));
  EXPECT_EQ(forward(*backend, *resnet, x), alone);
  std::size_t i = 0;
  for (const auto& named : resnet->named_buffers())
    if (named.tensor->dtype() == DType::kF32) {
      EXPECT_EQ(values_of(*backend, *named.tensor), before[i++]);
    }
  const auto dropped = model({.name = "gpt",
                              .sample_shape = {4},
                              .classes = 5,
                              .gpt = {.layers = 1, .heads = 1, .width = 8, .context = 4, .dropout = 0.5}});
  // Without a seed and step, dropout in training would be refused.
  const Tensor tokens = tokens_of({1, 4}, {0, 1, 2, 3});
  EXPECT_EQ(forward(*backend, *dropped, tokens), forward(*backend, *dropped, tokens));
  dropped->train(true);
  EXPECT_THROW(forward(*backend, *dropped, tokens), UsageError);
}

TEST_F(Inference, SiblingsComputeTheSameAtTheSameTime) {
  const auto module = model({.name = "resnet18-cifar", .sample_shape = {32, 32, 3}, .classes = 10});
  module->fuse();
  const auto expected = forward(*backend, *module, random_tensor(*backend, {1, 32, 32, 3}, 1));
  constexpr std::size_t kThreads = 3;
  std::vector<std::vector<float>> results(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const auto sibling = backend->sibling(1);
      const Tensor x = random_tensor(*sibling, {1, 32, 32, 3}, 1);
      for (int round = 0; round < 3; ++round) results[t] = forward(*sibling, *module, x);
    });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) {
    EXPECT_EQ(result, results[0]);
    expect_near(result, expected);
  }
}

}  // namespace
}  // namespace lockstep::nn
