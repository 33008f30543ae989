// How many kernels operators start, on a GPU in software.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/layers/layers.h"
#include "tests/nn/values.h"
#include "tests/soft_cuda/libraries.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct Started {
  std::uint64_t forward = 0, backward = 0;
};

class Launches : public ::testing::Test {
 protected:
  template <class Forward>
  Started count(Tape& tape, const Shape& shape, const Forward& forward) {
    return count(tape, shape, shape, forward);
  }
  template <class Forward>
  Started count(Tape& tape, const Shape& shape, const Shape& result, const Forward& forward) {
    const Var x = tape.differentiable_input(random_tensor(*backend, shape, 1));
    Tensor grad = random_tensor(*backend, result, 2);
    const auto sum = [this] {
      check_cuda(cudaStreamSynchronize(native(backend->stream())), "waiting for what is counted");
      const soft_cuda::Counts now = soft_cuda::counts();
      return now.launches + now.copies;
    };
    const std::uint64_t begin = sum();
    const Var y = forward(x);
    const std::uint64_t middle = sum();
    tape.backward(y, std::move(grad));
    const std::uint64_t end = sum();
    tape.reset();
    return {middle - begin, end - middle};
  }

  std::unique_ptr<Backend> backend = make_cuda_backend({});
  Generator generator{1};
  Context context{*backend, generator};
};

// Statistics of chunks; those of all of them, by which the running ones move and batches are counted; the result.
TEST_F(Launches, BatchNormTrainsInThreeKernels) {
  BatchNorm norm(context, 6);
  Tape tape(*backend);
  for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
    EXPECT_EQ(count(tape, {40, 6}, [&](Var x) { return norm.forward(tape, x, epilogue); }).forward, 3u);
  std::int64_t batches = 0;
  const NamedBuffer counter = norm.named_buffers()[2];
  ASSERT_EQ(counter.name, "num_batches_tracked");
  backend->download(*counter.tensor, std::as_writable_bytes(std::span(&batches, 1)));
  EXPECT_EQ(batches, 2);
}

// A residual network: the gradients of the two that read a block's result are added where its normalisation reads them.
TEST_F(Launches, BatchNormAddsTheGradientsOfItsTwoReaders) {
  BatchNorm norm(context, 6);
  Tape tape(*backend);
  const auto cpu = make_cpu_backend(1);
  const auto block = [&](Tape& on, BatchNorm& by, Var x) {
    const Var y = by.forward_add_relu(on, gelu(on, x), x);
    return add(on, gelu(on, y), gelu(on, gelu(on, y)));
  };
  // Three of GELU for what follows, three of the normalisation, one of GELU and one addition for x.
  EXPECT_EQ(count(tape, {40, 6}, [&](Var x) { return block(tape, norm, x); }).backward, 8u);

  const auto gradients_on = [&](Backend& there) {
    Generator numbers(1);
    Context made{there, numbers};
    BatchNorm by(made, 6);
    Tape on(there);
    const Var x = on.differentiable_input(random_tensor(there, {40, 6}, 1));
    on.backward(block(on, by, x), random_tensor(there, {40, 6}, 2));
    auto all = values_of(there, on.grad(x));
    for (const auto& named : by.named_parameters())
      for (const float value : values_of(there, named.parameter->gradient())) all.push_back(value);
    return all;
  };
  const auto expected = gradients_on(*cpu), got = gradients_on(*backend);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4f) << i;
}

// Sums of chunks, sums of all of them right where the parameters want their gradients, and the input's gradient. Where
// gradients are added to others, two more.
TEST_F(Launches, BatchNormGradientsAreWrittenWhereTheyBelong) {
  BatchNorm norm(context, 6);
  Tape tape(*backend);
  const auto pass = [&] { return count(tape, {40, 6}, [&](Var x) { return norm.forward(tape, x, Epilogue::kNone); }); };
  EXPECT_EQ(pass().backward, 3u);
  std::vector<std::vector<float>> once;
  for (const auto& named : norm.named_parameters()) once.push_back(values_of(*backend, named.parameter->gradient()));
  EXPECT_EQ(pass().backward, 5u);
  std::size_t at = 0;
  for (const auto& named : norm.named_parameters()) {
    const auto twice = values_of(*backend, named.parameter->gradient());
    for (std::size_t i = 0; i < twice.size(); ++i) EXPECT_EQ(twice[i], 2 * once[at][i]) << named.name;
    ++at;
  }
  // What nobody wants has to lie somewhere.
  for (const auto& named : norm.named_parameters()) named.parameter->clear_grad();
  norm.named_parameters()[0].parameter->set_requires_grad(false);
  EXPECT_EQ(pass().backward, 3u);
  EXPECT_FALSE(norm.named_parameters()[0].parameter->has_gradient());
  EXPECT_EQ(values_of(*backend, norm.named_parameters()[1].parameter->gradient()), once[1]);
}

// A block of a transformer: the gradient that goes past the normalisation is there before. The normalisation's backward
// takes two kernels: one reads x and dy, adds to dx and leaves sums of chunks for its parameters, which the other
// joins.
TEST_F(Launches, LayerNormAddsToTheGradientThatGoesPastIt) {
  LayerNorm norm(context, 8);
  Tape tape(*backend);
  const Started alone = count(tape, {10, 8}, [&](Var x) { return norm.forward(tape, x); });
  EXPECT_EQ(alone.backward, 2u);
  const auto block = [&](Var x) {
    x = gelu(tape, x);
    return add(tape, x, gelu(tape, norm.forward(tape, x)));
  };
  // Those, and two of GELU, of which the inner one may not overwrite what also goes past it.
  EXPECT_EQ(count(tape, {10, 8}, block).backward, alone.backward + 2);
  // What nobody wants is not computed.
  norm.named_parameters()[0].parameter->set_requires_grad(false);
  EXPECT_EQ(count(tape, {10, 8}, [&](Var x) { return norm.forward(tape, x); }).backward, 2u);
  norm.named_parameters()[1].parameter->set_requires_grad(false);
  EXPECT_EQ(count(tape, {10, 8}, [&](Var x) { return norm.forward(tape, x); }).backward, 1u);
  // Rows too wide for registers: the parameters' gradients take two kernels, the input's one.
  LayerNorm wide(context, 8200);
  EXPECT_EQ(count(tape, {2, 8200}, [&](Var x) { return wide.forward(tape, x); }).backward, 3u);
}

TEST_F(Launches, LayerNormAddsWhatItReadsInOneKernel) {
  LayerNorm norm(context, 8);
  Tape tape(*backend);
  const auto block = [&](Var x) {
    const SumAndNorm made = norm.forward_added(tape, x, x);
    return add(tape, made.sum, made.norm);
  };
  EXPECT_EQ(count(tape, {10, 8}, block).forward, 2u);
}

// The bias's gradient comes out of the product of the weight's, unless there is something to add it to.
TEST_F(Launches, LinearHasTheBiasGradientFromItsProduct) {
  Linear linear(context, 12, 8);
  Tape tape(*backend);
  const auto pass = [&] {
    const std::uint64_t before = soft_cuda::cublaslt_counts().products;
    const Started started = count(tape, {10, 12}, {10, 8}, [&](Var x) { return linear.forward(tape, x); });
    EXPECT_EQ(soft_cuda::cublaslt_counts().products, before + 3);
    return started;
  };
  EXPECT_EQ(pass().backward, 0u) << "beside the products";
  EXPECT_EQ(pass().backward, 1u) << "sums are added in a kernel of ours";
}

}  // namespace
}  // namespace lockstep::nn
