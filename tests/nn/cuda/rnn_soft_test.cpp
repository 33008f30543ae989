// What CUDA's recurrent layers ask cuDNN for, of a cuDNN in software: kinds of weight spaces, versions, what is kept
// and let go of.
#include <cudnn.h>

#include "nn/ops/cuda/plan_choices.h"
#include "tests/nn/cuda/device_values.h"
#include "tests/soft_cuda/libraries.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using soft_cuda::cudnn_rnn_counts;
using soft_cuda::set_cudnn_rnn;

class CudaRnnSoft : public DeviceTest {
 protected:
  ~CudaRnnSoft() override { set_cudnn_rnn({}); }

  static constexpr std::int64_t kBatch = 3, kSteps = 4, kInputs = 5, kWidth = 6;

  RnnWeights weights_of(RnnCell cell) {
    const std::int64_t gates = gates_of(cell) * kWidth;
    return {.w_ih = activation(random({gates, kInputs}, 1)),
            .w_hh = activation(random({gates, kWidth}, 2)),
            .b_ih = activation(random({gates}, 3)),
            .b_hh = activation(random({gates}, 4)),
            .versions = {1, 2, 3, 4}};
  }

  // Results and gradients, concatenated.
  std::vector<float> train(RnnKernels& rnn, RnnCell cell) {
    const RnnOptions options = {.cell = cell};
    const RnnWeights weights = weights_of(cell);
    const Tensor x = activation(random({kBatch, kSteps, kInputs}, 5));
    const Tensor dy = activation(random({kBatch, kSteps, kWidth}, 6));
    std::vector<float> all;
    for (const Tensor& made : results(
             {activation_like(dy.shape()),
              activation_like(x.shape()),
              {weights.w_ih.shape()},
              {weights.w_hh.shape()},
              {weights.b_ih.shape()},
              {weights.b_hh.shape()}},
             [&](const auto& out) {
               const Tensor kept = rnn.forward(options, x, weights, {}, out[0], {}, true);
               rnn.backward(options, x, weights, {}, out[0], kept, dy, {out[2], out[3], out[4], out[5]}, out[1], [] {});
             })) {
      const auto values = values_of(made);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  // Of a cell of each kind.
  std::vector<float> train(RnnKernels& rnn) {
    std::vector<float> all;
    for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru}) {
      const auto one = train(rnn, cell);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  // One pass forward.
  void compute(RnnKernels& rnn, RnnCell cell) {
    const Tensor x = activation(random({kBatch, kSteps, kInputs}, 5));
    const Tensor y = Tensor::empty(allocator, {kBatch, kSteps, kWidth}, type());
    rnn.forward({.cell = cell}, x, weights_of(cell), {}, y, {}, true);
    stream.synchronize();
  }
  std::vector<float> train() { return train(*cuda::make_rnn_kernels(context, *pointwise)); }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
};

// Where cuDNN wants the weights changes nothing.
TEST_P(CudaRnnSoft, WeightsMayLieAnywhere) {
  const auto scattered = train();
  set_cudnn_rnn({.scattered = false});
  EXPECT_EQ(train(), scattered);
}

// An old cuDNN knows no bf16: it computes in f32, from the same numbers and to the same types.
TEST_P(CudaRnnSoft, OldVersionsComputeInF32) {
  const auto before = cudnn_rnn_counts();
  const auto with = train();
  EXPECT_EQ(cudnn_rnn_counts().bf16 > before.bf16, type() == DType::kBF16);
  set_cudnn_rnn({.version = 91200});
  const auto old = cudnn_rnn_counts();
  const auto without = train();
  EXPECT_EQ(cudnn_rnn_counts().bf16, old.bf16);
  EXPECT_GT(cudnn_rnn_counts().forwards, old.forwards);
  ASSERT_EQ(without.size(), with.size());
  for (std::size_t i = 0; i < with.size(); ++i)
    ASSERT_NEAR(without[i], with[i], type() == DType::kBF16 ? 0.03f * (1.0f + std::abs(with[i])) : 0.0f) << i;
}

// Everything is made once and let go of in the end.
TEST_P(CudaRnnSoft, NothingIsMadeTwice) {
  const auto before = cudnn_rnn_counts().live;
  {
    const auto rnn = cuda::make_rnn_kernels(context, *pointwise);
    train(*rnn);
    const auto live = cudnn_rnn_counts().live;
    const auto made = context.primitives_created;
    EXPECT_GT(live, before);
    train(*rnn);
    EXPECT_EQ(cudnn_rnn_counts().live, live);
    EXPECT_EQ(context.primitives_created, made);
  }
  EXPECT_EQ(cudnn_rnn_counts().live, before);
}

// Note [Recurrent algorithms]. All compute the same here; which one did, is counted.
TEST_P(CudaRnnSoft, TheFastestAlgorithmIsTaken) {
  enum : std::uint32_t { kStandard = 1, kPersistent = 2, kCompiled = 4, kFewFeatures = 8 };
  struct Case {
    const char* what;
    soft_cuda::CudnnRnnSettings settings;
    bool deterministic;
    int taken;
  };
  const auto expected = train();
  const lockstep::testing::TemporaryDirectory directory;
  for (const Case& tried : {
           Case{"there is one", {.algorithms = kStandard, .slow = kStandard}, true, CUDNN_RNN_ALGO_STANDARD},
           Case{"no other is faster", {.algorithms = 15, .slow = 14}, true, CUDNN_RNN_ALGO_STANDARD},
           Case{"a persistent one is", {.algorithms = 15, .slow = 13}, true, CUDNN_RNN_ALGO_PERSIST_STATIC},
           Case{"a compiled one is", {.algorithms = 15, .slow = 11}, true, CUDNN_RNN_ALGO_PERSIST_DYNAMIC},
           Case{"it refuses to run",
                {.algorithms = 15, .refusing = kPersistent, .slow = 5},
                true,
                CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H},
           Case{"it is not repeatable",
                {.algorithms = 3, .unrepeatable = kPersistent, .slow = kStandard},
                true,
                CUDNN_RNN_ALGO_STANDARD},
           Case{"which is allowed",
                {.algorithms = 3, .unrepeatable = kPersistent, .slow = kStandard},
                false,
                CUDNN_RNN_ALGO_PERSIST_STATIC},
       }) {
    SCOPED_TRACE(tried.what);
    set_cudnn_rnn(tried.settings);
    cuda::PlanChoices choices((directory.path() / tried.what / "kernels.txt").string());
    context.choices = &choices;
    context.deterministic = tried.deterministic;
    const auto rnn = cuda::make_rnn_kernels(context, *pointwise);
    if (tried.deterministic)
      EXPECT_EQ(train(*rnn), expected);
    else
      compute(*rnn, RnnCell::kGru);
    EXPECT_EQ(cudnn_rnn_counts().last_algorithm, tried.taken);
    // What is noted is not tried again.
    const auto forwards = cudnn_rnn_counts().forwards;
    const auto again = cuda::make_rnn_kernels(context, *pointwise);
    compute(*again, RnnCell::kGru);
    EXPECT_EQ(cudnn_rnn_counts().forwards, forwards + 1);
    EXPECT_EQ(cudnn_rnn_counts().last_algorithm, tried.taken);
    context.choices = nullptr;
    context.deterministic = true;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaRnnSoft, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
