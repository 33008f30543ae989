// Convolutions on CUDA against the CPU's. In software cuDNN's part of them is plain loops (tests/soft_cuda/cudnn.cpp).
#include <fstream>

#include "base/error.h"
#include "tests/nn/cuda/sums.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct Layer {
  Shape x;
  std::int64_t out;
  Window window;
  std::int64_t groups = 1;

  Shape w() const { return {out, window.kernel[0], window.kernel[1], x[3] / groups}; }
  Shape y() const { return {x[0], window.output_extent(0, x[1]), window.output_extent(1, x[2]), out}; }
};

// Odd channels, windows that are not square, strides that leave a rest, nothing but padding, no samples.
const Layer kLayers[] = {
    {{2, 7, 7, 3}, 5, {{3, 3}, {1, 1}, {1, 1}}},
    {{1, 17, 17, 1}, 33, {{3, 3}, {2, 2}, {1, 1}}},
    {{3, 7, 3, 17}, 7, {{3, 3}, {1, 1}, {0, 0}}},
    {{1, 33, 7, 3}, 17, {{5, 5}, {2, 3}, {2, 2}}},
    {{7, 3, 3, 33}, 17, {{1, 1}, {1, 1}, {0, 0}}},
    {{1, 1, 1, 1}, 1, {{1, 1}, {1, 1}, {0, 0}}},
    {{1, 1, 1, 3}, 3, {{3, 3}, {1, 1}, {1, 1}}},
    {{2, 8, 8, 16}, 32, {{3, 3}, {2, 2}, {0, 0}}},
    {{2, 8, 8, 32}, 64, {{3, 3}, {1, 1}, {1, 1}}},
    {{1, 7, 17, 5}, 1, {{1, 7}, {1, 1}, {0, 3}}},
    {{2, 16, 16, 64}, 128, {{1, 1}, {2, 2}, {0, 0}}},
    {{1, 32, 32, 3}, 64, {{7, 7}, {2, 2}, {3, 3}}},
    {{4, 28, 28, 1}, 32, {{3, 3}, {1, 1}, {1, 1}}},
    {{0, 8, 8, 3}, 4, {{3, 3}, {1, 1}, {1, 1}}},
    // In groups, of few channels too; depthwise, with two filters of each channel as well.
    {{2, 7, 7, 4}, 8, {{3, 3}, {1, 1}, {1, 1}}, 2},
    {{1, 9, 5, 48}, 32, {{5, 3}, {2, 3}, {2, 1}}, 4},
    {{2, 9, 7, 24}, 24, {{3, 3}, {2, 2}, {1, 1}}, 24},
    {{3, 5, 5, 4}, 16, {{3, 3}, {1, 1}, {1, 1}}, 4},
    {{1, 8, 8, 33}, 33, {{3, 3}, {1, 1}, {1, 1}}, 33},
};

class CudaConv : public DeviceTest {
 protected:
  // cuDNN's gradients of weights have the activations' type before they are added to what is there: they are off by its
  // rounding, however small the sum.
  Tolerance of_weights(std::int64_t terms, const Tensor& gradient) const {
    Tolerance tolerance = tolerance_of_sum(terms, type());
    if (type() == DType::kF32) return tolerance;
    for (const float v : gradient.span<float>())
      tolerance.scale = std::max(tolerance.scale, static_cast<double>(std::abs(v)));
    tolerance.ulps += 0x1p15;  // 2⁻⁸
    return tolerance;
  }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear = cuda::make_linear_kernels(context, *pointwise);
  std::unique_ptr<ConvKernels> conv = cuda::make_conv_kernels(context, *pointwise, *linear);
};

TEST_P(CudaConv, Forward) {
  for (const Layer& layer : kLayers) {
    SCOPED_TRACE(to_string(layer.x) + " to " + to_string(layer.y()));
    const Operand x = activations(random(layer.x, 1)), w = activations(random(layer.w(), 2));
    const Tensor b_host = random({layer.out}, 3), product = cpu->empty(layer.y());
    cpu->conv().forward(x.host, w.host, 0, Tensor(), layer.window, Epilogue::kNone, product);
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      for (const bool bias : {false, true}) {
        const Operand b = activations(bias ? b_host : Tensor());
        const auto y =
            compare(cpu->conv(), *conv, {activation_like(layer.y())}, {}, [&](auto& on, Side at, const auto& made) {
              on.forward(at(x), at(w), 0, at(b), layer.window, epilogue, made[0]);
            });
        expect_close(y.expected[0], y.got[0], tolerance_of_sum(layer.w().count() / layer.out, type()),
                     bias ? sizes_of(*cpu, product) : Tensor());
      }
  }
}

TEST_P(CudaConv, BackwardInput) {
  for (const Layer& layer : kLayers) {
    SCOPED_TRACE(to_string(layer.x) + " to " + to_string(layer.y()));
    const Operand dy = activations(random(layer.y(), 1)), w = activations(random(layer.w(), 2));
    compare(cpu->conv(), *conv, {activation_like(layer.x)},
            {tolerance_of_sum(layer.w().count() / layer.w()[3] / layer.groups, type())},
            [&](auto& on, Side at, const auto& made) { on.backward_input(at(dy), at(w), 0, layer.window, made[0]); });
  }
}

TEST_P(CudaConv, BackwardWeight) {
  for (const Layer& layer : kLayers)
    for (const auto& [accumulate_w, accumulate_b, bias] : {std::array{false, false, true},
                                                           {true, true, true},
                                                           {true, false, true},
                                                           {false, true, true},
                                                           {false, false, false},
                                                           {true, false, false}}) {
      SCOPED_TRACE(fmt::format("{} to {}, accumulate {} {}, bias {}", to_string(layer.x), to_string(layer.y()),
                               accumulate_w, accumulate_b, bias));
      const Operand x = activations(random(layer.x, 1)), dy = activations(random(layer.y(), 2));
      const Tensor dw_before = random_tensor(*cpu, layer.w(), 3), db_before = random_tensor(*cpu, {layer.out}, 4);
      const Tensor added = cpu->empty(layer.w());
      cpu->conv().backward_weight(x.host, dy.host, layer.window, false, added, false, Tensor());
      const std::int64_t terms = layer.y().count() / layer.out;
      compare(cpu->conv(), *conv, {{layer.w(), DType::kF32, dw_before}, {{layer.out}, DType::kF32, db_before}},
              {of_weights(terms, added), tolerance_of_sum(terms, DType::kF32)},
              [&, add_w = accumulate_w, add_b = accumulate_b, with_bias = bias](auto& on, Side at, const auto& made) {
                on.backward_weight(at(x), at(dy), layer.window, add_w, made[0], add_b, with_bias ? made[1] : Tensor());
              });
    }
}

// See Note [Alignment for cuDNN]. Aligned and copied arrays have the same plan.
TEST_P(CudaConv, OneArrayThatLiesBadly) {
  const Layer layer = {{2, 7, 7, 8}, 16, {{3, 3}, {1, 1}, {1, 1}}};
  const Tensor x_host = random(layer.x, 1), w_host = random(layer.w(), 2), b_host = random({layer.out}, 3);
  const Tensor dy_host = random(layer.y(), 4), dw_before = random_tensor(*cpu, layer.w(), 5);
  const Tensor y = cpu->empty(layer.y()), dx = cpu->empty(layer.x), dw = cpu->empty(layer.w());
  const Tensor product = cpu->empty(layer.y()), added = cpu->empty(layer.w());
  cpu->conv().forward(x_host, w_host, 0, Tensor(), layer.window, Epilogue::kNone, product);
  cpu->conv().forward(x_host, w_host, 0, b_host, layer.window, Epilogue::kRelu, y);
  cpu->conv().backward_input(dy_host, w_host, 0, layer.window, dx);
  cpu->conv().backward_weight(x_host, dy_host, layer.window, false, dw, false, Tensor());
  cpu->pointwise().copy(dw_before, added);
  cpu->pointwise().add_to(dw, 1.0f, added);
  const std::int64_t taps = 9;
  std::uint64_t plans = 0;
  for (const int badly : {-1, 0, 1, 2, 3, 4, 5, 6}) {
    SCOPED_TRACE(badly);
    const auto at = [&](int number) { return badly == number ? 1 : 0; };
    const Tensor x = on_device(x_host, type(), at(0)), w = on_device(w_host, type(), at(1)),
                 b = on_device(b_host, type(), at(2)), dy = on_device(dy_host, type(), at(3)),
                 made_y = on_device(cpu->zeros(y.shape()), type(), at(4)),
                 made_dx = on_device(cpu->zeros(dx.shape()), type(), at(5));
    conv->forward(x, w, 0, b, layer.window, Epilogue::kRelu, made_y);
    conv->backward_input(dy, w, 0, layer.window, made_dx);
    expect_close(y, on_host(download(made_y), {y.shape(), type()}), tolerance_of_sum(taps * 8, type()),
                 sizes_of(*cpu, product));
    expect_close(dx, on_host(download(made_dx), {dx.shape(), type()}), tolerance_of_sum(taps * 16, type()));
    for (const bool accumulate : {false, true}) {
      const Tensor made_dw = on_device(dw_before, DType::kF32, at(6));
      conv->backward_weight(x, dy, layer.window, accumulate, made_dw, false, Tensor());
      expect_close(accumulate ? added : dw, on_host(download(made_dw), {dw.shape()}), of_weights(2 * 49, dw));
    }
    if (badly < 0) plans = context.primitives_created;
    EXPECT_EQ(context.primitives_created, plans);
  }
}

TEST_P(CudaConv, ReluLeavesNanAndInfinity) {
  for (const Layer& layer :
       {Layer{{2, 9, 9, 3}, 5, {{3, 3}, {1, 1}, {1, 1}}}, Layer{{1, 8, 8, 64}, 64, {{3, 3}, {1, 1}, {1, 1}}},
        Layer{{2, 8, 8, 32}, 128, {{1, 1}, {1, 1}, {0, 0}}}}) {
    SCOPED_TRACE(to_string(layer.x) + " to " + to_string(layer.y()));
    const Tensor x_host = random(layer.x, 1), w_host = random(layer.w(), 2), b_host = random({layer.out}, 3);
    const Tensor w = activation(w_host), b = activation(b_host);
    const auto forward = [&] {
      const Tensor x = activation(x_host);
      return results({activation_like(layer.y())},
                     [&](const auto& made) { conv->forward(x, w, 0, b, layer.window, Epilogue::kRelu, made[0]); })[0];
    };
    forward();
    x_host.f32()[0] = kNaN;
    x_host.f32()[x_host.count() - 1] = kInfinity;
    const Tensor expected = cpu->empty(layer.y());
    cpu->conv().forward(x_host, w_host, 0, b_host, layer.window, Epilogue::kRelu, expected);
    ASSERT_TRUE(std::isnan(expected.f32()[0]) && std::isnan(expected.f32()[layer.out - 1]));
    expect_close(expected, forward(), tolerance_of_sum(layer.w().count() / layer.out, type()));
  }
}

TEST_P(CudaConv, SteadyStateBuildsNothing) {
  const Layer& layer = kLayers[8];
  const Tensor x = activation(random(layer.x, 1)), w = activation(random(layer.w(), 2)),
               b = activation(random({64}, 3));
  const Tensor y = activation(random(layer.y(), 4)), dx = activation(random(layer.x, 5));
  const Tensor dw = plain(random_tensor(*cpu, layer.w(), 6)), db = plain(random_tensor(*cpu, {64}, 7));
  const auto step = [&] {
    conv->forward(x, w, 0, b, layer.window, Epilogue::kRelu, y);
    conv->backward_input(y, w, 0, layer.window, dx);
    conv->backward_weight(x, y, layer.window, false, dw, false, db);
    conv->backward_weight(x, y, layer.window, true, dw, true, db);
  };
  step();
  const std::uint64_t plans = context.primitives_created, pieces = allocator.stats().system_allocations;
  step();
  EXPECT_EQ(context.primitives_created, plans);
  EXPECT_EQ(allocator.stats().system_allocations, pieces);
}

// It would bring its own device, streams and errors.
TEST_P(CudaConv, NoSecondCudaRuntimeIsLoaded) {
  const Layer& layer = kLayers[0];
  const Tensor x = activation(random(layer.x, 1)), w = activation(random(layer.w(), 2));
  conv->forward(x, w, 0, Tensor(), layer.window, Epilogue::kNone, activation(random(layer.y(), 3)));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) EXPECT_EQ(line.find("libcudart"), std::string::npos) << line;
}

INSTANTIATE_TEST_SUITE_P(Types, CudaConv, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
