// cuDNN's plans for an H100 that need not be there: built from a description of it.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <set>

#include "base/cuda/library.h"
#include "base/error.h"
#include "lockstep/base/device.h"
#include "nn/ops/cuda/cudnn.h"

namespace lockstep::nn::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;
using What = ConvProblem::What;

// As cuDNN describes an NVIDIA H100 80GB HBM3 (SXM).
constexpr const char* kH100 = R"({
  "deviceName": "NVIDIA H100 80GB HBM3", "cudaDeviceId": 0, "pciDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
  "multiProcessorCount": 132, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": 52428800,
  "totalGlobalMem": 85029158912, "warpSize": 32, "maxGridSize": [2147483647, 65535, 65535],
  "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32,
  "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152,
  "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "isTccDriver": 0,
  "supportCoopLaunch": 1
})";

struct Layer {
  std::int64_t in, extent, out;
  Window window;
  std::int64_t groups = 1;
};

// cnn's two on 28x28, then ResNet's: the first, inside a block, between stages, and its shortcut. In groups; depthwise,
// MobileNet's.
const Layer kLayers[] = {
    {1, 28, 32, {{3, 3}, {1, 1}, {1, 1}}},       {32, 28, 64, {{3, 3}, {1, 1}, {1, 1}}},
    {3, 224, 64, {{7, 7}, {2, 2}, {3, 3}}},      {64, 56, 64, {{3, 3}, {1, 1}, {1, 1}}},
    {64, 56, 128, {{3, 3}, {2, 2}, {1, 1}}},     {64, 56, 256, {{1, 1}, {1, 1}, {0, 0}}},
    {256, 56, 512, {{1, 1}, {2, 2}, {0, 0}}},    {3, 17, 5, {{5, 3}, {2, 1}, {2, 0}}},
    {64, 28, 128, {{3, 3}, {1, 1}, {1, 1}}, 4},  {32, 112, 32, {{3, 3}, {1, 1}, {1, 1}}, 32},
    {96, 112, 96, {{3, 3}, {2, 2}, {1, 1}}, 96}, {960, 7, 960, {{3, 3}, {1, 1}, {1, 1}}, 960},
};

ConvProblem problem_of(What what, const Layer& layer, DType dtype) {
  ConvProblem problem;
  problem.what = what;
  problem.dtype = dtype;
  problem.x = {64, layer.extent, layer.extent, layer.in};
  problem.w = {layer.out, layer.window.kernel[0], layer.window.kernel[1], layer.in / layer.groups};
  problem.y = {64, layer.window.output_extent(0, layer.extent), layer.window.output_extent(1, layer.extent), layer.out};
  problem.window = layer.window;
  return problem;
}

std::vector<ConvProblem> problems(DType dtype) {
  std::vector<ConvProblem> all;
  for (const Layer& layer : kLayers) {
    for (const What what : {What::kForward, What::kBackwardInput, What::kBackwardWeight})
      all.push_back(problem_of(what, layer, dtype));
    ConvProblem fused = problem_of(What::kForward, layer, dtype);
    fused.bias = true;
    all.push_back(fused);
    fused.relu = true;
    all.push_back(fused);
  }
  return all;
}

constexpr const char* kInexact[] = {"nondeterministic", "reduced-precision", "down-converted"};

class CudnnPlans : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    try {
      Cudnn::version();
    } catch (const CudaError& error) {
      missing_ = error.what();
    }
  }
  void SetUp() override {
    if (!missing_.empty()) GTEST_SKIP() << missing_;
  }
  static std::string missing_;
};
std::string CudnnPlans::missing_;

TEST_F(CudnnPlans, ThereIsADeterministicOneForEveryConvolutionIn16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const ConvProblem& problem : problems(dtype)) {
      SCOPED_TRACE(problem.describe());
      const ConvPlan plan = Cudnn::plan_for(kH100, problem);
      for (const char* const note : kInexact) EXPECT_THAT(plan.describe(), Not(HasSubstr(note)));
      EXPECT_LT(plan.workspace_bytes(), std::size_t{1} << 30);
    }
}

TEST_F(CudnnPlans, F32UsesMatrixUnitsOnlyWithTf32) {
  bool uses_matrix_units = false;
  for (ConvProblem problem : problems(DType::kF32)) {
    SCOPED_TRACE(problem.describe());
    const ConvPlan plan = Cudnn::plan_for(kH100, problem);
    for (const char* const note : kInexact) EXPECT_THAT(plan.describe(), Not(HasSubstr(note)));
    EXPECT_THAT(plan.describe(), AllOf(Not(HasSubstr("tensor core")), Not(HasSubstr("transformed"))));
    EXPECT_LT(plan.workspace_bytes(), std::size_t{1} << 30);

    problem.tf32 = true;
    const ConvPlan faster = Cudnn::plan_for(kH100, problem);
    for (const char* const note : kInexact) EXPECT_THAT(faster.describe(), Not(HasSubstr(note)));
    uses_matrix_units |= faster.describe().find("tensor core") != std::string::npos;
  }
  EXPECT_TRUE(uses_matrix_units);
}

// What autotuning chooses from: the plan that would be taken without is the first that can be built.
TEST_F(CudnnPlans, KernelsToChooseFromAreAsExact) {
  bool several = false;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (const What what : {What::kForward, What::kBackwardInput, What::kBackwardWeight}) {
      const ConvProblem problem = problem_of(what, kLayers[3], dtype);
      SCOPED_TRACE(problem.describe());
      ConvKernelList kernels = Cudnn::kernels_for(kH100, problem, 8);
      ASSERT_FALSE(kernels.names().empty());
      EXPECT_LE(kernels.names().size(), 8u);
      EXPECT_EQ(std::set<std::string>(kernels.names().begin(), kernels.names().end()).size(), kernels.names().size());
      std::vector<std::string> built;
      for (std::size_t i = 0; i < kernels.names().size(); ++i) {
        for (const char* const note : kInexact) EXPECT_THAT(kernels.names()[i], Not(HasSubstr(note)));
        if (dtype == DType::kF32) {
          EXPECT_THAT(kernels.names()[i], Not(HasSubstr("tensor core")));
        }
        try {
          built.push_back(kernels.build(i).describe());
          EXPECT_EQ(built.back(), kernels.names()[i]);
        } catch (const CudaError&) {  // this GPU does not take it
        }
      }
      ASSERT_FALSE(built.empty());
      EXPECT_EQ(built.front(), Cudnn::plan_for(kH100, problem).describe());
      several |= built.size() > 1;
      EXPECT_EQ(Cudnn::kernels_for(kH100, problem, 8).names(), kernels.names()) << "another order";
    }
  EXPECT_TRUE(several);
}

// cuDNN compiles kernels of attention while it plans, with the driver's help.
bool there_is_a_driver() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver != nullptr) ::dlclose(driver);
  return driver != nullptr;
}

// GPT-2's, gpt's, one whose tokens fill no tile, narrow and wide heads. Without a driver cuDNN still takes the
// operations as they are described, and has kernels in mind; what is missing is named by it then.
TEST_F(CudnnPlans, ThereIsADeterministicOneForAttention) {
  struct Way {
    AttentionProblem::What what;
    bool causal, padded;
  };
  constexpr Way kWays[] = {{AttentionProblem::What::kForward, true, false},
                           {AttentionProblem::What::kBackward, true, false},
                           {AttentionProblem::What::kForward, false, true},
                           {AttentionProblem::What::kBackward, false, true}};
  for (const auto& [samples, tokens, heads, width] : {std::array<std::int64_t, 4>{8, 1024, 12, 64},
                                                      {8, 128, 4, 64},
                                                      {3, 77, 2, 64},
                                                      {2, 256, 3, 8},
                                                      {4, 512, 16, 128}})
    for (const auto& [what, causal, padded] : kWays) {
      const AttentionProblem problem = {.what = what,
                                        .samples = samples,
                                        .tokens = tokens,
                                        .heads = heads,
                                        .width = width,
                                        .pitch = 3 * heads * width,
                                        .causal = causal,
                                        .padded = padded};
      SCOPED_TRACE(problem.describe());
      if (!there_is_a_driver()) {
        AttentionProblem any_order = problem;
        any_order.deterministic = false;
        EXPECT_THAT([&] { Cudnn::plan_for(kH100, 90, any_order); },
                    ThrowsMessage<CudaError>(HasSubstr("No valid engine configs")));
        EXPECT_THAT([&] { Cudnn::plan_for(kH100, 90, problem); },
                    ThrowsMessage<CudaError>(HasSubstr("No valid engine configs")));
        continue;
      }
      const AttentionPlan plan = Cudnn::plan_for(kH100, 90, problem);
      EXPECT_THAT(plan.describe(), Not(HasSubstr("nondeterministic")));
      std::cout << problem.describe() << ": " << plan.describe() << ", " << plan.workspace_bytes() << " bytes\n";
      EXPECT_LT(plan.workspace_bytes(), std::size_t{1} << 30);
    }
}

TEST_F(CudnnPlans, InvalidConvolutionIsAnError) {
  ConvProblem problem = problem_of(What::kForward, kLayers[1], DType::kF32);
  problem.y[3] = 63;
  try {
    Cudnn::plan_for(kH100, problem);
    FAIL() << "a plan for what is no convolution";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the result of a 3x3 convolution"), HasSubstr("[64, 28, 28, 63], f32"),
                                    HasSubstr("cuDNN 9."), Not(HasSubstr("\n"))));
  }
  EXPECT_THROW(Cudnn::plan_for("{}", problem_of(What::kForward, kLayers[1], DType::kF32)), CudaError);
}

// Also those that only a GPU gets to call.
TEST_F(CudnnPlans, TheLibraryHasEveryFunction) {
  const SharedLibrary library("cuDNN", std::array<const char*, 1>{"libcudnn.so.9"}, "");
  for (const char* const function :
       {"cudnnGetVersion", "cudnnGetErrorString", "cudnnGetLastErrorString", "cudnnCreate", "cudnnDestroy",
        "cudnnSetStream", "cudnnBackendCreateDescriptor", "cudnnBackendDestroyDescriptor", "cudnnBackendSetAttribute",
        "cudnnBackendGetAttribute", "cudnnBackendFinalize", "cudnnBackendExecute"})
    EXPECT_NO_THROW(library.symbol(function));
}

TEST_F(CudnnPlans, WithoutAGpuItDoesNotStart) {
  if (probe_cuda().devices > 0) GTEST_SKIP() << "there is a GPU";
  try {
    const Cudnn cudnn{StreamView{}};
    FAIL() << "started without a GPU";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("starting cuDNN failed on a GPU: CUDNN_STATUS_"), Not(HasSubstr("\n"))));
  }
}

// It would bring its own device, streams and errors; which one is found is anybody's guess.
TEST_F(CudnnPlans, NoSecondCudaRuntimeIsLoaded) {
  try {
    Cudnn::plan_for(kH100, 90, {AttentionProblem::What::kBackward, 2, 128, 2, 64, 3 * 128});
  } catch (const CudaError&) {
    EXPECT_FALSE(there_is_a_driver());
  }
  Cudnn::plan_for(kH100, problem_of(What::kForward, kLayers[0], DType::kBF16));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) EXPECT_THAT(line, Not(HasSubstr("libcudart")));
}

TEST(AttentionProblem, KeysTellApartWhatNeedsPlansOfItsOwn) {
  const AttentionProblem first = {AttentionProblem::What::kForward, 2, 3, 4, 8};
  std::vector<AttentionProblem> others(10, first);
  others[0].what = AttentionProblem::What::kBackward;
  others[1].samples = 3;
  others[2].tokens = 4;
  others[3].heads = 5;
  others[4].width = 16;
  others[5].deterministic = false;
  others[6].causal = false;
  others[7].padded = true;
  others[8].pitch = 32;
  others[9].dtype = DType::kF16;
  std::set<PlanKey> keys = {first.key()};
  for (const AttentionProblem& other : others) keys.insert(other.key());
  EXPECT_EQ(keys.size(), others.size() + 1);
}

TEST(ConvProblem, KeysTellApartWhatNeedsPlansOfItsOwn) {
  const ConvProblem first = problem_of(What::kForward, kLayers[1], DType::kF32);
  std::vector<ConvProblem> others(11, first);
  others[0].what = What::kBackwardInput;
  others[1].dtype = DType::kBF16;
  others[2].x[0] = 63;
  others[3].x[3] = 33;
  others[4].w[1] = 5;
  others[5].y[2] = 27;
  others[6].window.stride[1] = 2;
  others[7].window.padding[0] = 2;
  others[8].bias = true;
  others[9].relu = true;
  others[10].tf32 = true;
  std::set<PlanKey> keys = {first.key()};
  for (const ConvProblem& other : others) keys.insert(other.key());
  EXPECT_EQ(keys.size(), others.size() + 1);
  EXPECT_EQ(ConvProblem(first).key(), first.key());
}

}  // namespace
}  // namespace lockstep::nn::cuda
