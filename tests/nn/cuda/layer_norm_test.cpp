// CUDA's layer normalisation against the CPU's, and against f64 where f32 sums could go wrong.
#include <ranges>

#include "base/error.h"
#include "nn/ops/elementwise_rules.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr double kLayerNormEps = 1e-5;

// Around what a warp, and a block, keep in registers; single rows and single columns; and nothing.
const Shape kLayerNormShapes[] = {{1, 1},    {3, 2},    {1, 8},    {9, 33},   {2, 3, 256}, {17, 257}, {5, 768},
                                  {3, 1024}, {2, 1025}, {2, 1600}, {1, 8192}, {1, 8200},   {70, 7},   {601, 16},
                                  {1030, 3}, {0, 5},    {2, 1056}, {2100, 8}, {1, 8193}};

class CudaLayerNorm : public DeviceTest {
 protected:
  // A team has a row, and further rows show nothing where columns are not added up.
  static auto shapes_of_few_rows() {
    return kLayerNormShapes |
           std::views::filter([](const Shape& shape) { return shape.count() <= 100 * columns_of(shape); });
  }
  // What the CPU makes of it.
  struct Forward {
    Tensor y, mean, inverse;
  };
  Forward on_cpu(const Tensor& x, const Tensor& gamma, const Tensor& beta) {
    const std::int64_t rows = x.count() / gamma.count();
    Forward made = {cpu->empty(x.shape()), cpu->empty({rows}), cpu->empty({rows})};
    cpu->layer_norm().forward(x, gamma, beta, kLayerNormEps, made.y, made.mean, made.inverse);
    return made;
  }
  // A row of nearly equal numbers makes their rounding as large as this.
  static double steepest(const Tensor& inverse) {
    double largest = 1.0;
    for (const float i : inverse.span<float>()) largest = std::max(largest, static_cast<double>(i));
    return largest;
  }

  std::unique_ptr<LayerNormKernels> norm = cuda::make_layer_norm_kernels(context);
};

TEST_P(CudaLayerNorm, Forward) {
  for (const Shape& shape : shapes_of_few_rows())
    for (const bool bias : {true, false}) {
      SCOPED_TRACE(to_string(shape));
      const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
      const Operand x = activations(random(shape, 1)), gamma = plains(random_tensor(*cpu, {columns}, 2));
      const Operand beta = plains(bias ? random_tensor(*cpu, {columns}, 3) : Tensor());
      const double steep = steepest(on_cpu(x.host, gamma.host, beta.host).inverse);
      compare(cpu->layer_norm(), *norm, {activation_like(shape), {{rows}}, {{rows}}},
              {{type(), 32.0, 2.0 * steep}, {DType::kF32, 8.0}, {DType::kF32, 32.0, steep * steep}},
              [&](auto& on, Side at, const auto& out) {
                on.forward(at(x), at(gamma), at(beta), kLayerNormEps, out[0], out[1], out[2]);
              });
    }
}

// The same bits as forward() of the sum, which is the pointwise kernels'.
TEST_P(CudaLayerNorm, ForwardAdded) {
  const auto pointwise = cuda::make_pointwise_kernels(context);
  for (const Shape& shape : shapes_of_few_rows()) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
    const Tensor x = activation(random(shape, 1)), residual = activation(random(shape, 4));
    const Tensor g = plain(random_tensor(*cpu, {columns}, 2)), b = plain(random_tensor(*cpu, {columns}, 3));
    const std::vector<Output> outputs = {activation_like(shape), activation_like(shape), {{rows}}, {{rows}}};
    const auto apart = results(outputs, [&](const auto& out) {
      pointwise->binary(BinaryOp::kAdd, x, residual, out[0]);
      norm->forward(out[0], g, b, kLayerNormEps, out[1], out[2], out[3]);
    });
    const auto at_once = results(outputs, [&](const auto& out) {
      norm->forward_added(x, residual, g, b, kLayerNormEps, out[0], out[1], out[2], out[3]);
    });
    for (std::size_t i = 0; i < outputs.size(); ++i) expect_same(apart[i], at_once[i]);
  }
}

TEST_P(CudaLayerNorm, BackwardInput) {
  for (const Shape& shape : shapes_of_few_rows()) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = columns_of(shape);
    const Operand x = activations(random(shape, 1)), gamma = plains(random_tensor(*cpu, {columns}, 3));
    Operand dy = activations(random(shape, 2));
    const Forward forward = on_cpu(x.host, gamma.host, Tensor());
    const Operand m = plains(forward.mean), i = plains(forward.inverse);
    const double steep = steepest(forward.inverse);
    // Of one column, or two, the result is the difference of equal numbers, made larger by `steep`.
    const Tolerance tolerance = {type(), 32.0, 4.0 * steep * (columns < 3 ? steep : 1.0)};
    const auto dx = compare(
        cpu->layer_norm(), *norm, {activation_like(shape)}, {tolerance},
        [&](auto& on, Side at, const auto& out) { on.backward_input(at(x), at(dy), at(gamma), at(m), at(i), out[0]); },
        &dy);
    const Tensor before = random(shape, 4);
    cpu->pointwise().add_to(before, 1.0f, dx.expected[0]);
    ASSERT_TRUE(norm->adds_to_gradients());
    const auto added = results({activation_like(shape, before)}, [&](const auto& out) {
      norm->backward_input_added(x.device, dy.device, gamma.device, m.device, i.device, out[0]);
    });
    expect_close(dx.expected[0], added[0], tolerance);
  }
}

TEST_P(CudaLayerNorm, BackwardParameters) {
  for (const Shape& shape : kLayerNormShapes)
    for (const int which : {0, 1, 2})  // both, gamma alone, beta alone
      for (const bool accumulate : {false, true}) {
        if (shape.count() > 4096 && (which != 0 || !accumulate)) continue;  // a GPU in software takes seconds for it
        if (columns_of(shape) > 2000) continue;                             // no row is in registers here
        SCOPED_TRACE(fmt::format("{} {} {}", to_string(shape), which, accumulate));
        const std::int64_t columns = columns_of(shape), rows = shape.count() / columns;
        const Operand x = activations(random(shape, 1)), dy = activations(random(shape, 2));
        const Forward forward = on_cpu(x.host, random_tensor(*cpu, {columns}, 3), Tensor());
        const Operand m = plains(forward.mean), i = plains(forward.inverse);
        const Output like = {{columns}, DType::kF32, random_tensor(*cpu, {columns}, 4)};
        const double steep = steepest(forward.inverse), sum = std::sqrt(static_cast<double>(rows));
        const double ulps = 8.0 + static_cast<double>(rows) / 8.0;  // the CPU adds up the rows one by one
        compare(cpu->layer_norm(), *norm, {like, like},
                {{DType::kF32, ulps, 2.0 * steep * sum}, {DType::kF32, ulps, sum}},
                [&](auto& on, Side at, const auto& out) {
                  on.backward_parameters(at(x), at(dy), at(m), at(i), accumulate, which == 2 ? Tensor() : out[0],
                                         accumulate, which == 1 ? Tensor() : out[1]);
                });
      }
}

// Both at once, which reads rows once that fit into registers. dx is what it is by itself.
TEST_P(CudaLayerNorm, Backward) {
  enum Wanted { kBoth, kGamma, kBeta };
  for (const std::int64_t columns : {1, 3, 7, 16, 256, 257, 768, 1024, 1025, 8192, 8200})
    for (const std::int64_t rows : {0, 1, 3, 40, 1000}) {
      const Shape shape = {rows, columns};
      // A GPU in software takes seconds for what is large. The second stage sees more than 64 chunks.
      if (rows == 1000 ? columns != 3 && columns != 16 : columns > 2000 && rows != 3) continue;
      const Operand x = activations(random(shape, 1)), gamma = plains(random_tensor(*cpu, {columns}, 3));
      Operand dy = activations(random(shape, 2));
      const Tensor dx_before = random(shape, 4);
      const Output like = {{columns}, DType::kF32, random_tensor(*cpu, {columns}, 5)};
      const Forward forward = on_cpu(x.host, gamma.host, Tensor());
      const double steep = steepest(forward.inverse),
                   sum = std::sqrt(static_cast<double>(std::max<std::int64_t>(rows, 1)));
      const double ulps = 8.0 + static_cast<double>(rows) / 8.0;  // the CPU adds up the rows one by one
      const Operand m = plains(forward.mean), i = plains(forward.inverse);
      for (const Wanted wanted : {kBoth, kGamma, kBeta})
        for (const bool accumulate : {false, true})
          for (const bool add : {false, true}) {
            if (std::max(shape.count(), columns) > 256 && (wanted != kBoth || accumulate != add)) continue;
            if (columns > 2000 && !add) continue;
            SCOPED_TRACE(fmt::format("{} {} {} {}", to_string(shape), static_cast<int>(wanted), accumulate, add));
            const auto backward = [&](auto& on, Side at, const auto& out) {
              on.backward(at(x), at(dy), at(gamma), at(m), at(i), add && at.on_device, out[0], accumulate,
                          wanted == kBeta ? Tensor() : out[1], accumulate, wanted == kGamma ? Tensor() : out[2]);
              if (add && !at.on_device) cpu->pointwise().add_to(dx_before, 1.0f, out[0]);
            };
            // Of one column, or two, the result is the difference of equal numbers, made larger by `steep`.
            compare(cpu->layer_norm(), *norm, {activation_like(shape, dx_before), like, like},
                    {{type(), 32.0, 4.0 * steep * (columns < 3 ? steep : 1.0)},
                     {DType::kF32, ulps, 2.0 * steep * sum},
                     {DType::kF32, ulps, sum}},
                    backward, add ? nullptr : &dy);
          }
    }
}

// Means that are thousands of deviations away from 0, where Σx² − (Σx)²/C would be noise.
TEST_P(CudaLayerNorm, FarFromZero) {
  const std::int64_t rows = 7, columns = 640;
  const Tensor host = random_tensor(*cpu, {rows, columns}, 1);
  for (float& v : host.span<float>()) v += 4000.0f;
  rounded(host);
  const Tensor mean = cpu->empty({rows}), variance = cpu->empty({rows}), ones = cpu->empty({columns});
  cpu->pointwise().fill(ones, 1.0f);
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0, squares = 0;
    for (std::int64_t c = 0; c < columns; ++c) sum += static_cast<double>(host.f32()[r * columns + c]);
    sum /= static_cast<double>(columns);
    for (std::int64_t c = 0; c < columns; ++c)
      squares += std::pow(static_cast<double>(host.f32()[r * columns + c]) - sum, 2);
    mean.f32()[r] = static_cast<float>(sum);
    variance.f32()[r] = static_cast<float>(squares / static_cast<double>(columns));
  }
  const Tensor x = activation(host), g = plain(ones);
  const auto got = results({activation_like({rows, columns}), {{rows}}, {{rows}}}, [&](const auto& out) {
    norm->forward(x, g, Tensor(), kLayerNormEps, out[0], out[1], out[2]);
  });
  expect_close(mean, got[1], {DType::kF32, 8.0});
  for (std::int64_t r = 0; r < rows; ++r) {
    const double got_variance = std::pow(static_cast<double>(got[2].f32()[r]), -2.0) - kLayerNormEps;
    EXPECT_NEAR(got_variance, static_cast<double>(variance.f32()[r]), 2e-3) << r;  // an ulp of the mean is 5e-4
  }
}

TEST_P(CudaLayerNorm, NaNAndInfinityStayInTheirRows) {
  for (const std::int64_t columns : {40, 2048}) {
    const Shape shape = {20, columns};
    const Tensor host = random(shape, 1), dy_host = random(shape, 2);
    host.f32()[3 * columns + 1] = kNaN;
    host.f32()[5 * columns] = kInfinity;
    const Tensor x = activation(host), g = plain(random_tensor(*cpu, {columns}, 3)), dy = activation(dy_host);
    const auto forward = results({activation_like(shape), {{20}}, {{20}}}, [&](const auto& out) {
      norm->forward(x, g, g, kLayerNormEps, out[0], out[1], out[2]);
    });
    const Tensor m = plain(forward[1]), i = plain(forward[2]);
    const auto backward =
        results({activation_like(shape)}, [&](const auto& out) { norm->backward_input(x, dy, g, m, i, out[0]); });
    for (std::int64_t at = 0; at < host.count(); ++at) {
      const bool sound = at / columns != 3 && at / columns != 5;
      ASSERT_EQ(std::isfinite(forward[0].f32()[at]), sound) << at;
      ASSERT_EQ(std::isfinite(backward[0].f32()[at]), sound) << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaLayerNorm, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
