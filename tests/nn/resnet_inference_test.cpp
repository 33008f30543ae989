// ResNets and MobileNet in evaluation, on the CPU: they are too much for a GPU in software.
#include <thread>

#include "tests/nn/inference.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST_F(Inference, NormalisationsBecomePartOfConvolutions) {
  for (const char* name : {"resnet18", "resnet34", "resnet50", "resnet18-cifar", "mobilenet-v2"}) {
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

// The batch's statistics are training's alone, and nothing of the model moves.
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
}

TEST_F(Inference, StreamsShareTheWeightsOfConvolutions) {
  const auto module = model({.name = "resnet18-cifar", .sample_shape = {32, 32, 3}, .classes = 10});
  module->fuse();
  const auto expected = forward(*backend, *module, random_tensor(*backend, {1, 32, 32, 3}, 1));
  constexpr std::size_t kThreads = 3;
  std::vector<std::vector<float>> results(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const auto stream = backend->make_stream(1);
      const Tensor x = random_tensor(*stream, {1, 32, 32, 3}, 1);
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
