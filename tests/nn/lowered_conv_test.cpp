// Convolutions as products, beside plain sums.
#include "nn/ops/cpu/lowered_conv.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/cpu.h"
#include "tests/nn/plain_conv.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using cpu::LoweredConv;

// Of the largest number: three times what is seen.
constexpr double kLoweredNear = 2e-6;

/// With `accumulate`, gradients of weights come twice.
ConvResults<float> computed(int threads, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy,
                            const Window& window, bool accumulate) {
  const auto backend = make_cpu_backend(threads);
  LoweredConv conv(backend->allocator());
  const Tensor y = backend->empty(dy.shape()), dx = backend->empty(x.shape());
  const Tensor dw = backend->empty(w.shape()), db = backend->empty(b.shape());
  for (const Tensor& made : {y, dx, dw, db}) backend->pointwise().fill(made, std::nanf(""));
  conv.forward(x, w, b, window, y);
  conv.backward_input(dy, w, window, dx);
  conv.backward_weight(x, dy, window, false, dw, false, db);
  if (accumulate) conv.backward_weight(x, dy, window, true, dw, true, db);
  return {values_of(y), values_of(dx), values_of(dw), values_of(db)};
}

struct LoweredCase {
  Shape x;
  std::int64_t outputs;
  Window window;
};

const LoweredCase kLoweredCases[] = {
    {{2, 7, 5, 40}, 37, {.kernel = {1, 1}, .stride = {1, 1}, .padding = {0, 0}}},
    {{2, 7, 6, 40}, 33, {.kernel = {1, 1}, .stride = {2, 2}, .padding = {0, 0}}},
    {{3, 9, 8, 16}, 35, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}},
    {{1, 17, 15, 3}, 40, {.kernel = {7, 7}, .stride = {2, 2}, .padding = {3, 3}}},
    {{1, 9, 12, 8}, 32, {.kernel = {2, 3}, .stride = {3, 1}, .padding = {0, 2}}},
    {{1, 2, 2, 16}, 32, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}},
    {{4, 40, 40, 64}, 32, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}},  // more than are taken at a time
};

TEST(LoweredConv, IsTheConvolutionByAnyNumberOfThreads) {
  if (!cpu_features().avx2 || !cpu_features().fma) GTEST_SKIP() << "no AVX2";
  const auto backend = make_cpu_backend(1);
  for (const LoweredCase& each : kLoweredCases) {
    const Window& window = each.window;
    SCOPED_TRACE(fmt::format("{} with a window of {} by {}, stride {} and {}", to_string(each.x), window.kernel[0],
                             window.kernel[1], window.stride[0], window.stride[1]));
    const Tensor x = random_tensor(*backend, each.x, 1),
                 w = random_tensor(*backend, {each.outputs, window.kernel[0], window.kernel[1], each.x[3]}, 2),
                 b = random_tensor(*backend, {each.outputs}, 3),
                 dy = random_tensor(
                     *backend,
                     {each.x[0], window.output_extent(0, each.x[1]), window.output_extent(1, each.x[2]), each.outputs},
                     4);
    ASSERT_TRUE(LoweredConv::suits(x.shape(), w.shape(), window));
    ConvResults<double> wanted = plain_conv(x, w, b, dy, window);
    const ConvResults<float> alone = computed(1, x, w, b, dy, window, false);
    EXPECT_LT(distance_of(wanted.y, alone.y), kLoweredNear);
    EXPECT_LT(distance_of(wanted.dx, alone.dx), kLoweredNear);
    EXPECT_LT(distance_of(wanted.dw, alone.dw), kLoweredNear);
    EXPECT_LT(distance_of(wanted.db, alone.db), kLoweredNear);
    for (const int threads : {2, 3})
      EXPECT_EQ(computed(threads, x, w, b, dy, window, false), alone) << threads << " threads";
    for (auto* const sums : {&wanted.dw, &wanted.db})
      for (double& sum : *sums) sum *= 2;
    const ConvResults<float> twice = computed(1, x, w, b, dy, window, true);
    EXPECT_LT(distance_of(wanted.dw, twice.dw), kLoweredNear);
    EXPECT_LT(distance_of(wanted.db, twice.db), kLoweredNear);
  }
}

TEST(LoweredConv, LeavesOthersToOneDnn) {
  const Window same = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};
  EXPECT_FALSE(LoweredConv::suits({2, 16, 16, 64}, {64, 3, 3, 64}, same)) << "each pixel would be copied nine times";
  EXPECT_FALSE(LoweredConv::suits({2, 16, 16, 16}, {64, 1, 1, 16}, {})) << "few products for each copied pixel";
  EXPECT_FALSE(LoweredConv::suits({2, 16, 16, 64}, {10, 1, 1, 64}, {})) << "few outputs";
  EXPECT_FALSE(LoweredConv::suits({0, 16, 16, 64}, {64, 1, 1, 64}, {})) << "no image";
}

}  // namespace
}  // namespace lockstep::nn
