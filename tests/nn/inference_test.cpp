// Evaluation: what generation computes step by step is what forward() computes at once, normalisations within
// convolutions change nothing, and the streams of a backend see the same weights. On the device of
// make_gradient_backend().
#include <thread>

#include "tests/nn/inference.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST_F(Inference, TokensOneByOneAndInAnyPiecesAreAsAllAtOnce) {
  for (const bool other : {false, true}) {
    const auto module = other ? llama() : gpt();
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

TEST_F(Inference, CapacityOfTheCacheIsEnforced) {
  const auto module = gpt(6);
  EXPECT_EQ(language(module).positions(), 6);
  EXPECT_EQ(language(module).vocabulary(), 11);
  Tape tape(*backend);
  tape.set_recording(false);
  EXPECT_THROW(language(module).begin(tape, 1, 7), UsageError);
  EXPECT_THROW(language(module).begin(tape, 0, 3), UsageError);
  EXPECT_THROW(language(llama()).begin(tape, 1, 13), UsageError);
  const auto memory = language(module).begin(tape, 1, 4);
  static_cast<void>(language(module).next(tape, tokens_of({1, 3}, {1, 2, 3}), *memory));
  EXPECT_THROW(language(module).next(tape, tokens_of({1, 2}, {1, 2}), *memory), UsageError);
  EXPECT_THROW(language(module).next(tape, tokens_of({2, 1}, {1, 2}), *memory), UsageError);
  static_cast<void>(language(module).next(tape, tokens_of({1, 1}, {1}), *memory));
  EXPECT_EQ(memory->seen(), 4);
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

// Dropout is training's alone.
TEST_F(Inference, DropoutIsOff) {
  const auto dropped =
      model({.name = "gpt",
             .sample_shape = {4},
             .classes = 5,
             .settings = {{"layers", 1}, {"heads", 1}, {"width", 8}, {"context", 4}, {"dropout", 0.5}}});
  // Without a seed and step, dropout in training would be refused.
  const Tensor tokens = tokens_of({1, 4}, {0, 1, 2, 3});
  EXPECT_EQ(forward(*backend, *dropped, tokens), forward(*backend, *dropped, tokens));
  dropped->train(true);
  EXPECT_THROW(forward(*backend, *dropped, tokens), UsageError);
}

TEST_F(Inference, StreamsComputeTheSameConcurrently) {
  const auto module = gpt();
  const auto expected = forward(*backend, *module, tokens_of(*backend, {1, 4}, {1, 2, 3, 4}));
  constexpr std::size_t kThreads = 3;
  std::vector<std::vector<float>> results(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const auto stream = backend->make_stream(1);
      const Tensor x = tokens_of(*stream, {1, 4}, {1, 2, 3, 4});
      for (int round = 0; round < 3; ++round) results[t] = forward(*stream, *module, x);
    });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) {
    EXPECT_EQ(result, results[0]);
    expect_near(result, expected);
  }
}

}  // namespace
}  // namespace lockstep::nn
