// What computes the gradient of a convolution's weight (Note [Few channels]): with and without times, and as the file
// notes it.
#include <gmock/gmock.h>

#include <filesystem>
#include <memory>
#include <string>

#include "nn/ops/cuda/plan_choices.h"
#include "tests/nn/cuda/sums.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using cuda::PlanChoices;
using ::testing::HasSubstr;

class SoftConv : public DeviceTest {
 protected:
  static constexpr Window kWindow = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};

  std::string file() const { return directory.path() / "kernels.txt"; }
  // As a process of its own: kernels that know nothing but the file.
  void restart(bool times) {
    conv.reset();
    choices = times ? std::make_unique<PlanChoices>(file()) : nullptr;
    context.choices = choices.get();
    context.gpu = "Soft GPU";
    context.engines = {};
    conv = cuda::make_conv_kernels(context, *pointwise, *linear);
  }
  // Compares what is added to gradients with the CPU's. What computed them: "" where nothing says so.
  std::string engine_of(std::int64_t channels, bool accumulate, bool bias) {
    const Shape x_shape = {2, 6, 6, channels}, w_shape = {8, 3, 3, channels};
    const Tensor x_host = random(x_shape, 1), dy_host = random({2, 6, 6, 8}, 2);
    const Tensor dw = random_tensor(*cpu, w_shape, 3), db = random_tensor(*cpu, {8}, 4);
    const Tensor x = activation(x_host), dy = activation(dy_host);
    const Tensor made_w = plain(dw), made_b = plain(db);
    conv->backward_weight(x, dy, kWindow, accumulate, made_w, accumulate, bias ? made_b : Tensor());
    cpu->conv().backward_weight(x_host, dy_host, kWindow, accumulate, dw, accumulate, bias ? db : Tensor());
    Tolerance tolerance = tolerance_of_sum(72, DType::kF32);
    if (is_half(type())) tolerance = {.dtype = type(), .ulps = 0x1p15, .scale = 16.0};  // cuDNN's are rounded
    expect_close(dw, on_host(download(made_w), {w_shape}), tolerance);
    expect_close(db, on_host(download(made_b), {{8}}), tolerance_of_sum(72, DType::kF32));
    for (const auto& [operation, choice] : context.engines.all())
      if (operation.starts_with("gradient of a convolution's weight")) return choice.engine;
    return "";
  }

  lockstep::testing::TemporaryDirectory directory;
  std::unique_ptr<PlanChoices> choices;
  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear = cuda::make_linear_kernels(context, *pointwise);
  std::unique_ptr<ConvKernels> conv;
};

TEST_P(SoftConv, WithoutTimingOursTakesOneChannel) {
  restart(false);
  EXPECT_EQ(engine_of(1, false, true), "lockstep");
  restart(false);
  EXPECT_EQ(engine_of(3, false, true), "cuDNN in software");
  restart(false);
  EXPECT_EQ(engine_of(8, false, true), "");
}

TEST_P(SoftConv, TimedChoiceIsCachedAndUsed) {
  for (const std::int64_t channels : {1, 3})
    for (const bool accumulate : {false, true})
      for (const bool bias : {true, false}) {
        SCOPED_TRACE(fmt::format("{} channels, accumulate {}, bias {}", channels, accumulate, bias));
        std::filesystem::remove(file());
        restart(true);
        const std::string chosen = engine_of(channels, accumulate, bias);
        EXPECT_TRUE(chosen == "lockstep" || chosen == "cuDNN in software") << chosen;
        const std::string text = lockstep::testing::read_file(file());
        const auto begin = text.find('\n') + 1, tab = text.find('\t');
        const std::string problem = text.substr(begin, tab - begin);
        EXPECT_THAT(problem, HasSubstr("Soft GPU, cuDNN in software: few channels"));
        EXPECT_EQ(problem.ends_with(" and bias"), bias);
        for (const std::string wanted : {"lockstep", "cuDNN"}) {
          std::filesystem::remove(file());
          PlanChoices(file()).choose(problem, {"lockstep", "cuDNN"},
                                     [&](std::size_t i) { return (wanted == "cuDNN") == (i == 1) ? 1.0 : 2.0; });
          restart(true);
          EXPECT_THAT(engine_of(channels, accumulate, bias), ::testing::StartsWith(wanted));
          restart(true);
          const auto before = soft_cuda::counts().launches;
          engine_of(channels, accumulate, bias);
          EXPECT_LE(soft_cuda::counts().launches, before + 4) << "nothing is timed";
        }
      }
}

TEST_P(SoftConv, NothingIsTimedInACapture) {
  const Tensor x = activation(random({2, 6, 6, 1}, 1)), dy = activation(random({2, 6, 6, 8}, 2));
  const Tensor dw = plain(cpu->zeros({8, 3, 3, 1}));
  const auto run = [&] { conv->backward_weight(x, dy, kWindow, false, dw, false, Tensor()); };
  restart(false);
  run();  // the allocator has what a capture needs
  restart(true);
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capturing");
  run();
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream.get(), &graph), "capturing");
  cudaGraphDestroy(graph);
  EXPECT_FALSE(std::filesystem::exists(file()));
}

INSTANTIATE_TEST_SUITE_P(Types, SoftConv,
                         ::testing::Values(DeviceCase{DType::kF32, 0}, DeviceCase{DType::kBF16, 0},
                                           DeviceCase{DType::kF16, 1}),
                         name_of_case);

}  // namespace
}  // namespace lockstep::nn
