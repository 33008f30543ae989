// Gradients of convolutions of few channels (Note [Few channels]) against the CPU's.
#include "nn/ops/cuda/own_kernels.h"

#include <array>

#include "nn/ops/cuda/cudnn.h"
#include "tests/nn/cuda/sums.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct FewChannelLayer {
  Shape x;
  std::int64_t out;
  Window window;
  int passes;

  Shape w() const { return {out, window.kernel[0], window.kernel[1], x[3]}; }
  Shape y() const { return {x[0], window.output_extent(0, x[1]), window.output_extent(1, x[2]), out}; }
  cuda::ConvProblem problem(DType dtype) const {
    return {
        .what = cuda::ConvProblem::What::kBackwardWeight, .dtype = dtype, .x = x, .w = w(), .y = y(), .window = window};
  }
};

// Whole and partial runs of taps; several groups of them; samples in one band, in several, and with a rest; several
// tiles of filters, one not full; strides with a rest; only padding; one tap.
const FewChannelLayer kFewChannelLayers[] = {
    {{4, 28, 28, 1}, 32, {{3, 3}, {1, 1}, {1, 1}}, 1},     {{2, 9, 7, 2}, 8, {{3, 3}, {1, 1}, {1, 1}}, 2},
    {{3, 17, 15, 3}, 16, {{3, 3}, {2, 2}, {1, 1}}, 3},     {{2, 8, 8, 4}, 24, {{3, 3}, {1, 1}, {0, 0}}, 4},
    {{1, 33, 7, 1}, 72, {{5, 5}, {2, 3}, {2, 2}}, 4},      {{2, 5, 5, 1}, 200, {{2, 2}, {2, 2}, {0, 0}}, 1},
    {{1, 12, 1001, 1}, 64, {{3, 3}, {1, 250}, {1, 1}}, 1}, {{1, 20, 111, 1}, 8, {{3, 3}, {1, 1}, {1, 1}}, 1},
    {{1, 1, 1, 3}, 8, {{3, 3}, {1, 1}, {1, 1}}, 3},        {{70, 3, 3, 1}, 8, {{1, 1}, {1, 1}, {0, 0}}, 1},
    {{1, 7, 17, 1}, 16, {{1, 7}, {1, 1}, {0, 3}}, 1},      {{2, 7, 17, 1}, 16, {{7, 1}, {3, 2}, {3, 0}}, 3},
    {{1, 6, 6, 4}, 8, {{1, 1}, {3, 5}, {0, 0}}, 1},        {{500, 4, 4, 1}, 8, {{3, 3}, {1, 1}, {1, 1}}, 1},
    {{2, 7, 7, 5}, 8, {{1, 1}, {1, 1}, {0, 0}}, 0},        {{2, 7, 7, 1}, 32, {{7, 7}, {1, 1}, {3, 3}}, 0},
    {{2, 7, 7, 1}, 33, {{3, 3}, {1, 1}, {1, 1}}, 0},       {{1, 3, 1500, 1}, 8, {{3, 3}, {1, 1}, {1, 1}}, 0},
    {{1, 1, 4096, 1}, 8, {{1, 1}, {1, 5}, {0, 0}}, 1},
};

class FewChannels : public DeviceTest {};

TEST_P(FewChannels, GradientsAreTheCpus) {
  for (const FewChannelLayer& layer : kFewChannelLayers)
    for (const auto& how : {std::array{false, true, true}, {true, false, true}, {false, false, false}}) {
      const bool accumulate_w = how[0], accumulate_b = how[1], bias = how[2];
      SCOPED_TRACE(fmt::format("{} to {}, accumulate {} {}, bias {}", to_string(layer.x), to_string(layer.y()),
                               accumulate_w, accumulate_b, bias));
      const cuda::ConvProblem problem = layer.problem(type());
      ASSERT_EQ(cuda::few_channel_passes(problem), layer.passes);
      if (layer.passes == 0 || (bias && accumulate_w && layer.y().count() > 2000)) break;  // the end is of no size
      const Tensor x_host = random(layer.x, 1), dy_host = random(layer.y(), 2);
      const Tensor dw = random_tensor(*cpu, layer.w(), 3), db = random_tensor(*cpu, {layer.out}, 4);
      const Tensor x = activation(x_host), dy = on_device(dy_host, type(), 0);
      const auto got = results({{layer.w(), DType::kF32, dw}, {{layer.out}, DType::kF32, db}}, [&](const auto& made) {
        cuda::few_channel_gradients(context, problem, x, dy, accumulate_w, made[0], accumulate_b,
                                    bias ? made[1] : Tensor());
      });
      cpu->conv().backward_weight(x_host, dy_host, layer.window, accumulate_w, dw, accumulate_b, bias ? db : Tensor());
      const std::int64_t terms = layer.y().count() / layer.out;
      expect_close(dw, got[0], tolerance_of_sum(terms, DType::kF32));
      expect_close(db, got[1], tolerance_of_sum(terms, DType::kF32));
    }
}

// Each sum has its own numbers, and no other's.
TEST_P(FewChannels, NotFiniteNumbersStayInTheirSums) {
  const FewChannelLayer layer = {{2, 6, 6, 1}, 16, {{3, 3}, {1, 1}, {0, 0}}, 1};
  const Tensor x_host = random(layer.x, 1), dy_host = random(layer.y(), 2);
  x_host.f32()[0] = kNaN;                          // the first tap of the first output alone has it
  dy_host.f32()[dy_host.count() - 1] = kInfinity;  // of the last filter
  const Tensor dw = cpu->empty(layer.w()), db = cpu->empty({layer.out});
  cpu->conv().backward_weight(x_host, dy_host, layer.window, false, dw, false, db);
  const Tensor x = activation(x_host), dy = on_device(dy_host, type(), 0);
  const auto got = results({{layer.w()}, {{layer.out}}}, [&](const auto& made) {
    cuda::few_channel_gradients(context, layer.problem(type()), x, dy, false, made[0], false, made[1]);
  });
  ASSERT_TRUE(std::isnan(dw.f32()[0]) && std::isfinite(dw.f32()[1]));
  expect_close(dw, got[0], tolerance_of_sum(32, DType::kF32));
  expect_close(db, got[1], tolerance_of_sum(32, DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(Types, FewChannels, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
