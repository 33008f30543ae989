// Which kernels are taken (Note [Autotuning]): the choice, its file, and files that cannot be used. Of products, by a
// cuBLASLt in software that has several kernels.
#include "nn/ops/cuda/plan_choices.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "tests/nn/cuda/sums.h"
#include "tests/soft_cuda/libraries.h"
#include "tests/soft_cuda/soft_cuda.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn::cuda {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kNames = {"first", "second", "third"};

class Choices : public ::testing::Test {
 protected:
  std::string file() const { return directory_.path() / "cache" / "kernels.txt"; }

  /// Of a process of its own; how often it has timed a kernel is added to timed_.
  std::size_t choose(const std::vector<double>& seconds, const std::string& problem = "a product") {
    return choose_by(PlanChoices(file()), seconds, problem);
  }
  std::size_t choose_by(PlanChoices&& choices, const std::vector<double>& seconds, const std::string& problem) {
    return choices.choose(problem, kNames, [&](std::size_t i) {
      ++timed_;
      return seconds[i];
    });
  }
  std::string text() const {
    std::ifstream stream(file());
    std::stringstream all;
    all << stream.rdbuf();
    return all.str();
  }
  void write(const std::string& content) const {
    fs::create_directories(fs::path(file()).parent_path());
    std::ofstream(file()) << content;
  }

  lockstep::testing::TemporaryDirectory directory_;
  int timed_ = 0;
};

TEST_F(Choices, TheFastestIsTakenAndNoted) {
  EXPECT_EQ(choose({3, 2, 1}), 2u);
  EXPECT_EQ(timed_, 3);
  EXPECT_EQ(choose({1, 2, 3}), 2u) << "the file says so";
  EXPECT_EQ(timed_, 3) << "nothing is timed twice";
  EXPECT_EQ(choose({1, 2, 3}, "another product"), 0u);
  EXPECT_EQ(choose({3, 2, 1}, "another product"), 0u);
  EXPECT_THAT(text(), HasSubstr("a product\tthird\nanother product\tfirst\n"));
}

TEST_F(Choices, LibrarysFirstChoiceStaysUnlessAnotherIsClearlyFaster) {
  EXPECT_EQ(choose({1.0, 0.98, 0.99}), 0u);
  EXPECT_EQ(choose({1.0, 0.98, 0.95}, "another"), 2u);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  EXPECT_EQ(choose({kNever, kNever, 5.0}, "one that is refused"), 2u);
  EXPECT_EQ(choose({kNever, kNever, kNever}, "all are refused"), 0u);
}

TEST_F(Choices, OneKernelIsNoChoiceAndLeavesNoFile) {
  PlanChoices choices(file());
  EXPECT_EQ(choices.choose("a product", {"only"}, [](std::size_t) -> double { throw std::logic_error("timed"); }), 0u);
  EXPECT_FALSE(fs::exists(fs::path(file()).parent_path()));
}

TEST_F(Choices, WithoutTimingTheCachedOrTheFirstIsTaken) {
  EXPECT_EQ(PlanChoices(file()).noted("a product", kNames), 0u);
  choose({3, 1, 2});
  EXPECT_EQ(PlanChoices(file()).noted("a product", kNames), 1u);
  EXPECT_EQ(PlanChoices(file()).noted("another", kNames), 0u);
}

TEST_F(Choices, UnknownCachedKernelIsReplaced) {
  choose({3, 2, 1});
  PlanChoices choices(file());
  const auto seconds = [](std::size_t i) { return i == 1 ? 1.0 : 2.0; };
  EXPECT_EQ(choices.choose("a product", {"first", "new"}, seconds), 1u);
  EXPECT_THAT(text(), HasSubstr("a product\tnew\n"));
}

// A cut file, one of somebody else, nothing, a changed byte: ignored with one warning, and replaced as a whole.
TEST_F(Choices, ABrokenFileIsIgnoredAndReplaced) {
  choose({3, 2, 1});
  const std::string whole = text();
  std::string changed = whole;
  changed[changed.find("third")] = 'T';
  for (const std::string& broken : {whole.substr(0, whole.size() - 4), std::string("# my notes\n"), std::string(),
                                    changed, whole.substr(0, 10), std::string(1000, '\0')}) {
    write(broken);
    ::testing::internal::CaptureStderr();
    PlanChoices choices(file());
    EXPECT_EQ(choices.noted("a product", kNames), 0u);
    EXPECT_EQ(choices.choose("a product", kNames, [](std::size_t i) { return i == 1 ? 1.0 : 2.0; }), 1u);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, HasSubstr("it is ignored, and replaced"));
    EXPECT_EQ(said.find("ignored"), said.rfind("ignored")) << said;
    EXPECT_EQ(choose({1, 2, 3}), 1u);
  }
}

TEST_F(Choices, WithoutACacheFileNothingIsTimed) {
  std::ofstream(directory_.path() / "cache") << "a file where the directory should be";
  ::testing::internal::CaptureStderr();
  PlanChoices choices(file());
  for (const char* const problem : {"a product", "another"})
    EXPECT_EQ(choices.choose(problem, kNames, [](std::size_t i) { return i == 1 ? 1.0 : 2.0; }), 0u);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("--autotune no"));
  EXPECT_EQ(said.find("--autotune"), said.rfind("--autotune")) << "said once";
}

TEST_F(Choices, RanksThatChooseAtOnceAgree) {
  std::vector<std::size_t> chosen(4);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < chosen.size(); ++rank)
    ranks.emplace_back([&, rank] {
      PlanChoices choices(file());
      chosen[rank] = choices.choose("a product", kNames, [&](std::size_t i) { return i == rank % 3 ? 1.0 : 2.0; });
    });
  for (auto& rank : ranks) rank.join();
  for (const std::size_t one : chosen) EXPECT_EQ(one, chosen[0]);
}

// What a GPU does while it times may wait for another rank.
TEST_F(Choices, ARankThatTimesHoldsUpNoOther) {
  PlanChoices slow(file());
  bool begun = false;
  const std::size_t late = slow.choose("a product", kNames, [&](std::size_t i) {
    if (!std::exchange(begun, true)) {
      EXPECT_EQ(choose({3, 1, 2}), 1u);
    }
    return i == 2 ? 1.0 : 2.0;
  });
  EXPECT_EQ(late, 1u) << "what the first has noted counts";
}

// ---- Products ----

class SoftAutotune : public testing::DeviceTest {
 protected:
  static constexpr std::int64_t kN = 6, kIn = 9, kOut = 5;

  ~SoftAutotune() override { soft_cuda::set_cublaslt({}); }

  /// As a process of its own: kernels that know nothing but the file.
  void restart() {
    linear.reset();
    choices = std::make_unique<PlanChoices>(directory.path() / "kernels.txt");
    context.choices = choices.get();
    context.gpu = "Soft GPU";
    linear = make_linear_kernels(context, *pointwise);
  }
  Tensor forward() {
    return results({activation_like({kN, kOut})},
                   [&](const auto& made) { linear->forward(x, w, b, Epilogue::kNone, made[0]); })[0];
  }

  lockstep::testing::TemporaryDirectory directory;
  std::unique_ptr<PlanChoices> choices;
  Tensor x_host = random({kN, kIn}, 1), w_host = random({kOut, kIn}, 2), b_host = random({kOut}, 3);
  Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
  std::unique_ptr<PointwiseKernels> pointwise = make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear;
};

// Note [Odd sizes]: 5 rows of a weight's gradient as 8 of which 3 are zeros, where that is faster.
TEST_P(SoftAutotune, GradientsOfOddWeightsTakeTheFastestWay) {
  const Tensor dy_host = random({kN, kOut}, 4), before = testing::random_tensor(*cpu, {kOut, 16}, 5);
  const Tensor even_host = random({kN, 16}, 6), even_x = activation(even_host), dy = apart(dy_host);
  const Tensor dw = cpu->empty({kOut, 16}), sum = cpu->empty({kOut, 16});
  cpu->linear().backward_weight(even_host, dy_host, false, dw);
  cpu->pointwise().copy(before, sum);
  cpu->linear().backward_weight(even_host, dy_host, true, sum);
  const auto gradients = [&] {
    return results({{{kOut, 16}}, {{kOut, 16}, DType::kF32, before}}, [&](const auto& made) {
      linear->backward_weight(even_x, dy, false, made[0]);
      linear->backward_weight(even_x, dy, true, made[1]);
    });
  };
  soft_cuda::set_cublaslt({.kernels = 2, .slow_odd_sizes = true});
  for (const bool first : {true, false}) {
    SCOPED_TRACE(first);
    restart();
    const auto counted = soft_cuda::cublaslt_counts();
    const auto got = gradients();
    testing::expect_close(dw, got[0], {DType::kF32, 8.0});
    testing::expect_close(sum, got[1], {DType::kF32, 8.0});
    EXPECT_EQ(soft_cuda::cublaslt_counts().odd_sizes > counted.odd_sizes, first) << "it is timed once";
  }
}

TEST_P(SoftAutotune, ProductsTakeTheFastestKernelAndTakeItAgain) {
  soft_cuda::set_cublaslt({.kernels = 4, .fastest_kernel = 2});
  restart();
  const auto expected = testing::expected_layer(*cpu, x_host, w_host, b_host, Epilogue::kNone, type());
  testing::expect_close(expected.y, forward(), {type(), 8.0}, expected.rounded_before);
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 2);

  // Another would be the fastest now, but a run that is repeated has the same bits.
  soft_cuda::set_cublaslt({.kernels = 4, .fastest_kernel = 1});
  restart();
  const auto before = soft_cuda::cublaslt_counts().products;
  forward();
  EXPECT_EQ(soft_cuda::cublaslt_counts().products, before + 2) << "nothing is timed";
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 2);

  // Of another GPU nothing is known.
  restart();
  context.gpu = "Another GPU";
  forward();
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 1);
}

TEST_P(SoftAutotune, WithoutChoicesItIsTheLibrarysFirst) {
  soft_cuda::set_cublaslt({.kernels = 4, .fastest_kernel = 2});
  restart();
  context.choices = nullptr;
  linear = make_linear_kernels(context, *pointwise);
  const auto before = soft_cuda::cublaslt_counts().products;
  forward();
  EXPECT_EQ(soft_cuda::cublaslt_counts().products, before + 2);
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 0);
}

// cuBLASLt's kernels that sum up dy may be slower than a product and a kernel of ours (Note [Bias gradients]).
TEST_P(SoftAutotune, BiasGradientsComeFromWhatIsFaster) {
  const Tensor dy_host = random({kN, kOut}, 4), dw = cpu->empty({kOut, kIn}), db = cpu->empty({kOut});
  const Tensor dy = activation(dy_host);
  cpu->linear().backward_weight_and_bias(x_host, dy_host, false, dw, false, db);
  for (const bool slow : {false, true}) {
    soft_cuda::set_cublaslt({.slow_epilogue = slow ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_DGELU});
    fs::remove(directory.path() / "kernels.txt");
    restart();
    const auto got = results({{{kOut, kIn}}, {{kOut}}}, [&](const auto& made) {
      linear->backward_weight_and_bias(x, dy, false, made[0], false, made[1]);
    });
    testing::expect_close(dw, got[0], {DType::kF32, 16.0});
    testing::expect_close(db, got[1], {DType::kF32, 16.0});
    if (slow) {
      EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, CUBLASLT_EPILOGUE_DEFAULT);
    }
    restart();
    soft_cuda::set_cublaslt({});
    results({{{kOut, kIn}}, {{kOut}}},
            [&](const auto& made) { linear->backward_weight_and_bias(x, dy, false, made[0], false, made[1]); });
    if (slow) {
      EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, CUBLASLT_EPILOGUE_DEFAULT) << "as it is noted";
    }
  }
}

// So may those that go back through an activation.
TEST_P(SoftAutotune, GradientsThroughActivationsComeFromWhatIsFaster) {
  const Tensor dy_host = random({kN, kOut}, 4), v_host = random({kOut, 16}, 5), before_host = random({kN, 16}, 6);
  const Tensor dy = activation(dy_host), v = activation(v_host), before = activation(before_host);
  const Tensor dx = cpu->empty({kN, 16}), expected = cpu->empty({kN, 16});
  cpu->linear().backward_input(dy_host, v_host, dx);
  cpu->pointwise().unary_backward(UnaryOp::kGeluTanh, before_host, {}, dx, expected);
  for (const auto slow : {CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADB}) {
    soft_cuda::set_cublaslt({.slow_epilogue = slow});
    fs::remove(directory.path() / "kernels.txt");
    restart();
    const auto got = results({activation_like({kN, 16})}, [&](const auto& made) {
      linear->backward_input_through(dy, v, Epilogue::kGelu, before, made[0]);
    });
    testing::expect_close(expected, got[0],
                          {type(), is_half(type()) ? 0x1p16 * testing::finer_than_bf16(type()) : 16.0});
    if (slow == CUBLASLT_EPILOGUE_DGELU) {
      EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, CUBLASLT_EPILOGUE_DEFAULT);
    }
  }
}

// Kernels are tried on the operands themselves: what is added to must not have been added to before.
TEST_P(SoftAutotune, TimingLeavesSumsAlone) {
  soft_cuda::set_cublaslt({.kernels = 3, .fastest_kernel = 1});
  restart();
  const Tensor dy_host = random({kN, kOut}, 4), initial = testing::random_tensor(*cpu, {kOut, kIn}, 5);
  const Tensor dy = activation(dy_host), expected = cpu->empty({kOut, kIn});
  cpu->pointwise().copy(initial, expected);
  cpu->linear().backward_weight(x_host, dy_host, true, expected);
  const auto got = results({{{kOut, kIn}, DType::kF32, initial}},
                           [&](const auto& made) { linear->backward_weight(x, dy, true, made[0]); });
  testing::expect_close(expected, got[0], {DType::kF32, 16.0});
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 1);
}

TEST_P(SoftAutotune, NothingIsTimedInACapture) {
  soft_cuda::set_cublaslt({.kernels = 3, .fastest_kernel = 1});
  restart();
  const Tensor y = activation(cpu->empty({kN, kOut}));
  const auto before = soft_cuda::cublaslt_counts().products;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capturing");
  linear->forward(x, w, b, Epilogue::kNone, y);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream.get(), &graph), "capturing");
  cudaGraphDestroy(graph);
  EXPECT_EQ(soft_cuda::cublaslt_counts().products, before + 1);
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_kernel, 0);
  EXPECT_FALSE(fs::exists(directory.path() / "kernels.txt"));
}

// Also a stream beside it, and a backend without the file.
TEST_P(SoftAutotune, BackendsTakeTheirFile) {
  const std::string file = directory.path() / "of_backend.txt";
  const auto kernel_of = [&](Backend& backend) {
    const Tensor made = backend.empty({kN, kOut});
    backend.linear().forward(backend.zeros({kN, kIn}), backend.zeros({kOut, kIn}), Tensor(), Epilogue::kNone, made);
    return soft_cuda::cublaslt_counts().last_kernel;
  };
  soft_cuda::set_cublaslt({.kernels = 3, .fastest_kernel = 2});
  EXPECT_EQ(kernel_of(*make_cuda_backend({.plan_file = file})), 2);
  soft_cuda::set_cublaslt({.kernels = 3, .fastest_kernel = 1});
  const auto backend = make_cuda_backend({.plan_file = file});
  EXPECT_EQ(kernel_of(*backend), 2);
  EXPECT_EQ(kernel_of(*backend->make_stream(1)), 2);
  EXPECT_EQ(kernel_of(*make_cuda_backend({})), 0);
  EXPECT_THAT(lockstep::testing::read_file(file), HasSubstr("Soft GPU, cuBLASLt 1: product 9x5/9t@256"));
}

INSTANTIATE_TEST_SUITE_P(Types, SoftAutotune,
                         ::testing::Values(testing::DeviceCase{DType::kF32, 0}, testing::DeviceCase{DType::kBF16, 0},
                                           testing::DeviceCase{DType::kF16, 0}),
                         testing::name_of_case);

}  // namespace
}  // namespace lockstep::nn::cuda
