// What products do when cuBLASLt has no kernel, or one with a ReLU that loses NaN: against a cuBLASLt in software.
#include <gmock/gmock.h>

#include "tests/nn/cuda/sums.h"
#include "tests/soft_cuda/libraries.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using soft_cuda::CublasLtSettings;
using ::testing::HasSubstr;

class SoftLinear : public DeviceTest {
 protected:
  static constexpr std::int64_t kN = 6, kIn = 9, kOut = 5;

  ~SoftLinear() override { soft_cuda::set_cublaslt({}); }

  Tensor forward(Epilogue epilogue) {
    return results({activation_like({kN, kOut})},
                   [&](const auto& made) { linear->forward(x, w, b, epilogue, made[0]); })[0];
  }
  Tensor expected_forward(Epilogue epilogue) {
    const Tensor expected = cpu->empty({kN, kOut});
    cpu->linear().forward(x_host, w_host, b_host, epilogue, expected);
    return expected;
  }
  Tensor mask_of(std::int64_t samples, std::int64_t out) {
    const SavedPreactivation mask = linear->saved_preactivation_of(Epilogue::kRelu, samples, out, type());
    return Tensor::empty(allocator, mask.shape, mask.dtype);
  }
  // Where the bias comes in a kernel of its own the result is rounded before, too.
  Tolerance tolerance() const {
    return {.dtype = type(), .ulps = is_half(type()) ? 0x1p16 * finer_than_bf16(type()) : 8.0};
  }

  Tensor x_host = random({kN, kIn}, 1), w_host = random({kOut, kIn}, 2), b_host = random({kOut}, 3);
  Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear = cuda::make_linear_kernels(context, *pointwise);
};

TEST_P(SoftLinear, SoundReluIsFused) {
  const auto before = soft_cuda::cublaslt_counts().products;
  expect_close(expected_forward(Epilogue::kRelu), forward(Epilogue::kRelu), tolerance());
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, CUBLASLT_EPILOGUE_RELU_BIAS);
  // Two runs, and two that tried it once.
  EXPECT_EQ(soft_cuda::cublaslt_counts().products, before + 4);
}

TEST_P(SoftLinear, PitchesThatAreNoMultipleOf16BytesAreCounted) {
  auto before = soft_cuda::cublaslt_counts().odd_pitches;
  forward(Epilogue::kNone);  // rows of 9 and of 5
  EXPECT_GT(soft_cuda::cublaslt_counts().odd_pitches, before);
  const Tensor even_x = activation(random({kN, 16}, 1)), even_w = activation(random({8, 16}, 2));
  before = soft_cuda::cublaslt_counts().odd_pitches;
  results({activation_like({kN, 8})},
          [&](const auto& made) { linear->forward(even_x, even_w, Tensor(), Epilogue::kNone, made[0]); });
  EXPECT_EQ(soft_cuda::cublaslt_counts().odd_pitches, before);
}

// Trying a ReLU: what the product reads goes there in one piece, and nothing is started but the product and a kernel.
TEST_P(SoftLinear, TryingAReluTakesFewLaunchesAndCopies) {
  const Tensor y = activation(cpu->empty({kN, kOut})), mask = mask_of(kN, kOut);
  auto before = soft_cuda::counts();
  linear->forward(x, w, b, Epilogue::kRelu, y);
  auto after = soft_cuda::counts();
  EXPECT_EQ(after.launches, before.launches);
  EXPECT_EQ(after.copies, before.copies + 3);  // two biases, and two results
  before = after;
  linear->forward_saved_preactivation(x, w, b, Epilogue::kRelu, y, mask);
  after = soft_cuda::counts();
  EXPECT_EQ(after.launches, before.launches + 1);  // the mask as we make it
  EXPECT_EQ(after.copies, before.copies + 5);      // that, and the same for its kernel
}

TEST_P(SoftLinear, OwnMasksPassNan) {
  soft_cuda::set_cublaslt({.reverses_masks = true});
  linear = cuda::make_linear_kernels(context, *pointwise);
  x_host.f32()[kIn] = kNaN;
  x = activation(x_host);
  const Tensor mask = mask_of(kN, kOut);
  const auto y = results({activation_like({kN, kOut})}, [&](const auto& made) {
    linear->forward_saved_preactivation(x, w, b, Epilogue::kRelu, made[0], mask);
  });
  const Tensor expected = expected_forward(Epilogue::kRelu);
  ASSERT_TRUE(std::isnan(expected.f32()[kOut]));
  expect_close(expected, y[0], tolerance());
}

TEST_P(SoftLinear, OwnReluWhereTheLibrarysLosesNanOrInfinity) {
  std::vector<CublasLtSettings> all = {{.relu_loses_nan = true}};
  // To 16 bits the largest number of f32 is infinite.
  if (type() == DType::kF32) all.push_back({.relu_loses_infinity = true});
  for (const CublasLtSettings& settings : all) {
    soft_cuda::set_cublaslt(settings);
    linear = cuda::make_linear_kernels(context, *pointwise);
    expect_close(expected_forward(Epilogue::kRelu), forward(Epilogue::kRelu), tolerance());
    EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, CUBLASLT_EPILOGUE_BIAS);
    x_host.f32()[0] = settings.relu_loses_nan ? kNaN : kInfinity;
    x = activation(x_host);
    expect_close(expected_forward(Epilogue::kRelu), forward(Epilogue::kRelu), tolerance());
  }
}

TEST_P(SoftLinear, UnfusedEpiloguesRunAfterTheProduct) {
  for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
    for (const auto& [refused, used] : {std::pair{CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS},
                                        std::pair{CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DEFAULT}})
      for (const bool invalid : {false, true}) {
        soft_cuda::set_cublaslt(
            {.refused_epilogues = static_cast<std::uint32_t>(refused), .calls_refused_invalid = invalid});
        linear = cuda::make_linear_kernels(context, *pointwise);
        expect_close(expected_forward(epilogue), forward(epilogue), tolerance());
        EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue, used);
      }
}

// Masks that are packed otherwise, epilogues that there are no kernels for, a ReLU that loses NaN: with kernels of
// ours.
TEST_P(SoftLinear, OwnMasksWhereTheLibrarysDiffer) {
  const Tensor dy_host = random({kN, 3}, 4), v_host = random({3, kOut}, 5);
  const Tensor dy = activation(dy_host), v = activation(v_host);
  struct Case {
    CublasLtSettings settings;
    bool fused_forward, fused_backward;
  };
  const Case cases[] = {
      {{}, true, true},
      {{.relu_loses_nan = true}, false, true},
      {{.reverses_masks = true}, false, false},
      {{.refused_epilogues = CUBLASLT_EPILOGUE_RELU}, false, false},  // whether masks agree cannot be tried
      {{.refused_epilogues = 8}, true, false},                        // of DRELU alone
  };
  for (const auto& [settings, fused_forward, fused_backward] : cases) {
    soft_cuda::set_cublaslt(settings);
    linear = cuda::make_linear_kernels(context, *pointwise);
    const SavedPreactivation like = linear->saved_preactivation_of(Epilogue::kRelu, kN, kOut, type());
    const Tensor mask = Tensor::empty(allocator, like.shape, like.dtype);
    const auto y = results({activation_like({kN, kOut})}, [&](const auto& made) {
      linear->forward_saved_preactivation(x, w, b, Epilogue::kRelu, made[0], mask);
    });
    EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue == CUBLASLT_EPILOGUE_RELU_AUX_BIAS, fused_forward);
    expect_close(expected_forward(Epilogue::kRelu), y[0], tolerance());
    const auto dx = results({activation_like({kN, kOut})}, [&](const auto& made) {
      linear->backward_input_through(dy, v, Epilogue::kRelu, mask, made[0]);
    });
    EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue == CUBLASLT_EPILOGUE_DRELU, fused_backward);
    const Tensor expected = cpu->empty({kN, kOut});
    cpu->linear().backward_input(dy_host, v_host, expected);
    cpu->pointwise().unary_backward(UnaryOp::kRelu, {}, y[0], expected, expected);
    expect_close(expected, dx[0], tolerance());
  }
}

// See Note [Probing GELU].
TEST_P(SoftLinear, OwnGeluWhereTheLibrarysDiffers) {
  constexpr std::int64_t kWide = 16, kNext = 3;
  const bool half = is_half(type());
  const Tensor v = activation(random({kWide, kIn}, 2)), c = activation(random({kWide}, 3));
  const Tensor dy = activation(random({kN, kNext}, 4)), u = activation(random({kNext, kWide}, 5));
  struct Case {
    CublasLtSettings settings;
    bool tf32, fused_forward, fused_backward;
  };
  const Case cases[] = {
      {{}, false, true, true},
      {{.gelu_error = 1e-3f}, false, half, half},
      {{.gelu_error = 5e-6f}, false, half, half},
      {{.gelu_error = 5e-6f}, true, true, true},
      {{.other_gelu = true}, true, false, false},
      {{.refused_epilogues = CUBLASLT_EPILOGUE_GELU}, false, false, false},
      {{.refused_epilogues = 64}, false, true, false},  // of DGELU alone
  };
  std::vector<Tensor> first;
  for (const auto& [settings, tf32, fused_forward, fused_backward] : cases) {
    soft_cuda::set_cublaslt(settings);
    context.tf32 = tf32;
    linear = cuda::make_linear_kernels(context, *pointwise);
    const SavedPreactivation like = linear->saved_preactivation_of(Epilogue::kGelu, kN, kWide, type());
    const Tensor saved_preactivation = Tensor::empty(allocator, like.shape, like.dtype);
    const auto got =
        results({activation_like({kN, kWide}), activation_like({kN, kWide})},
                [&, forward = fused_forward, backward = fused_backward](const auto& made) {
                  linear->forward_saved_preactivation(x, v, c, Epilogue::kGelu, made[0], saved_preactivation);
                  EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS, forward);
                  linear->backward_input_through(dy, u, Epilogue::kGelu, saved_preactivation, made[1]);
                  EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue == CUBLASLT_EPILOGUE_DGELU, backward);
                });
    if (first.empty()) first = got;
    Tolerance close = tolerance();
    if (half)
      close = {type(), 0x1p16, 4.0};  // what is rounded in between, and by how much the rough one is off
    else if (tf32)
      close.ulps = 128.0;
    for (std::size_t i = 0; i < got.size(); ++i) expect_close(first[i], got[i], close);
    const auto inferred = results({activation_like({kN, kWide})},
                                  [&](const auto& made) { linear->forward(x, v, c, Epilogue::kGelu, made[0]); });
    EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue == CUBLASLT_EPILOGUE_GELU_BIAS, fused_forward);
    expect_close(first[0], inferred[0], close);
  }
}

// See Note [Bounds of products].
TEST_P(SoftLinear, RoundingOnTheWayIsWithinTheBoundAndAWrongKernelIsNot) {
  struct Sizes {
    std::int64_t n, in, out;
  };
  for (const auto& [n, in, out] : {Sizes{16, 5, 24}, Sizes{16, 784, 128}, Sizes{9, 3136, 33}, Sizes{200, 48, 66}})
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu, Epilogue::kGelu}) {
      SCOPED_TRACE(fmt::format("n {} in {} out {}, epilogue {}", n, in, out, static_cast<int>(epilogue)));
      const Tensor a_host = random({n, in}, 1), v_host = random({out, in}, 2), c_host = random({out}, 3);
      const auto expected = expected_layer(*cpu, a_host, v_host, c_host, epilogue, type());
      const auto share = [&](const Tensor& got) {
        rounded(got);
        return largest_deviation(expected.y, got, tolerance_of_sum(in, type()), expected.rounded_before).share;
      };
      enum class Gelu { kTanh, kOther };
      // Of `x`, rounded after the product, after the bias, and at the end.
      const auto in_steps = [&](const Tensor& x_used, bool bias, Gelu kind) {
        const Tensor y = cpu->empty({n, out});
        cpu->linear().forward(x_used, v_host, Tensor(), Epilogue::kNone, y);
        rounded(y);
        for (std::int64_t i = 0; i < y.count(); ++i) y.f32()[i] += bias ? c_host.f32()[i % out] : 0.0f;
        rounded(y);
        if (epilogue == Epilogue::kRelu) cpu->pointwise().unary(UnaryOp::kRelu, y, y);
        if (epilogue == Epilogue::kGelu && kind == Gelu::kTanh) cpu->pointwise().unary(UnaryOp::kGeluTanh, y, y);
        if (epilogue == Epilogue::kGelu && kind == Gelu::kOther)
          for (float& v : y.span<float>()) v /= 1.0f + std::exp(-1.702f * v);
        return y;
      };
      EXPECT_LE(share(in_steps(a_host, true, Gelu::kTanh)), 1.0);
      EXPECT_GT(share(in_steps(a_host, false, Gelu::kTanh)), 1.0) << "without the bias";
      if (epilogue == Epilogue::kGelu) {
        EXPECT_GT(share(in_steps(a_host, true, Gelu::kOther)), 1.0) << "another GELU";
      }
      const Tensor shorter = random({n, in}, 1);
      for (std::int64_t i = 0; i < n; ++i) shorter.f32()[i * in + in - 1] = 0.0f;
      EXPECT_GT(share(in_steps(shorter, true, Gelu::kTanh)), 1.0) << "without the last product";
    }
}

TEST_P(SoftLinear, BiasGradientsAreOursWhereTheLibraryHasNone) {
  const Tensor dy_host = random({kN, kOut}, 4), dw = cpu->empty({kOut, kIn}), db = cpu->empty({kOut});
  const Tensor dy = activation(dy_host);
  cpu->linear().backward_weight_and_bias(x_host, dy_host, false, dw, false, db);
  for (const bool refused : {false, true}) {
    soft_cuda::set_cublaslt({.refused_epilogues = refused ? std::uint32_t{CUBLASLT_EPILOGUE_BGRADB} : 0});
    linear = cuda::make_linear_kernels(context, *pointwise);
    const auto got = results({{{kOut, kIn}}, {{kOut}}}, [&](const auto& made) {
      linear->backward_weight_and_bias(x, dy, false, made[0], false, made[1]);
    });
    EXPECT_EQ(soft_cuda::cublaslt_counts().last_epilogue,
              refused ? CUBLASLT_EPILOGUE_DEFAULT : CUBLASLT_EPILOGUE_BGRADB);
    expect_close(dw, got[0], {DType::kF32, 8.0});
    expect_close(db, got[1], {DType::kF32, 8.0});
  }
}

TEST_P(SoftLinear, MissingKernelNamesTheSizes) {
  soft_cuda::set_cublaslt({.refused_epilogues = ~0u});
  try {
    linear->forward(x, w, b, Epilogue::kNone, activation(cpu->empty({kN, kOut})));
    FAIL() << "a product without a kernel";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cuBLASLt has no kernel for a 5 by 6 result of 9 products of"));
  }
}

TEST_P(SoftLinear, KernelsAreChosenOnceForEachShapeAndEpilogue) {
  const Tensor dx = activation(cpu->empty({kN, kIn})), dw = plain(cpu->empty({kOut, kIn}));
  const auto step = [&] {
    const Tensor y = activation(cpu->empty({kN, kOut}));
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu}) linear->forward(x, w, b, epilogue, y);
    linear->backward_input(y, w, dx);
    for (const bool accumulate : {false, true}) linear->backward_weight(x, y, accumulate, dw);
  };
  const auto before = soft_cuda::cublaslt_counts();
  const std::uint64_t built = context.primitives_created;
  step();
  const auto first = soft_cuda::cublaslt_counts();
  EXPECT_EQ(first.heuristics, before.heuristics + 5);
  EXPECT_EQ(context.primitives_created, built + 5);
  step();
  const auto second = soft_cuda::cublaslt_counts();
  EXPECT_EQ(second.heuristics, first.heuristics);
  EXPECT_EQ(second.live, first.live);
  linear.reset();
  EXPECT_EQ(soft_cuda::cublaslt_counts().live, before.live - 1);  // its handle was there before
}

TEST_P(SoftLinear, WorkspaceIsSharedAndAskedForOnce) {
  soft_cuda::set_cublaslt({.workspace_bytes = std::uint64_t{32} << 20});
  const std::size_t before = allocator.stats().bytes_in_use;
  for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
    expect_close(expected_forward(epilogue), forward(epilogue), tolerance());
  EXPECT_EQ(allocator.stats().bytes_in_use, before + (std::size_t{32} << 20));
}

TEST_P(SoftLinear, Tf32IsUsedWhereAskedForAndOnlyInF32) {
  forward(Epilogue::kNone);
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_compute, CUBLAS_COMPUTE_32F);
  context.tf32 = true;
  linear = cuda::make_linear_kernels(context, *pointwise);
  forward(Epilogue::kNone);
  EXPECT_EQ(soft_cuda::cublaslt_counts().last_compute,
            type() == DType::kF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
}

TEST_P(SoftLinear, ProductsKeepTheOrderOfTheirStream) {
  soft_cuda::set_streams(soft_cuda::Streams::kLazy);
  const Tensor w2_host = random({kIn, kOut}, 4), w2 = activation(w2_host);
  const Tensor y = cpu->empty({kN, kOut}), expected = cpu->empty({kN, kIn});
  cpu->linear().forward(x_host, w_host, b_host, Epilogue::kRelu, y);
  cpu->linear().forward(rounded(y), w2_host, Tensor(), Epilogue::kNone, expected);
  const auto got = results({activation_like({kN, kIn})}, [&](const auto& made) {
    const Tensor between = Tensor::empty(allocator, {kN, kOut}, type());
    linear->forward(x, w, b, Epilogue::kRelu, between);
    linear->forward(between, w2, Tensor(), Epilogue::kNone, made[0]);
  });
  Tolerance close = tolerance();
  close.scale = 4.0;  // of the products in between, which are rounded, too
  expect_close(expected, got[0], close);
  soft_cuda::set_streams(soft_cuda::Streams::kEager);
}

INSTANTIATE_TEST_SUITE_P(Types, SoftLinear, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
