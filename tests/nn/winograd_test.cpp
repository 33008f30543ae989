// Convolutions in Winograd's way, our own, beside plain sums; tests of all kernels (kernels_test.cpp) have small ones.
#include "nn/ops/cpu/winograd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/cpu.h"
#include "tests/nn/plain_conv.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using cpu::WinogradConv;

constexpr Window kThree = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};

// Of the largest number: two to three times what is seen. The points 1 and 2 do not come as near.
constexpr double kNear = 5e-6;

struct Results {
  ConvResults<float> conv;
  std::vector<float> rectified;
  friend bool operator==(const Results&, const Results&) = default;
};

Results computed(int threads, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy) {
  const auto backend = make_cpu_backend(threads);
  WinogradConv conv(backend->allocator(), nullptr);
  const Tensor y = backend->empty(dy.shape()), rectified = backend->empty(dy.shape()), dx = backend->empty(x.shape());
  const Tensor dw = backend->empty(w.shape()), db = backend->empty(b.shape());
  for (const Tensor& made : {y, rectified, dx, dw, db}) backend->pointwise().fill(made, std::nanf(""));
  conv.forward(x, w, 1, b, false, y);
  conv.forward(x, w, 1, b, true, rectified);
  conv.backward_input(dy, w, dx);
  conv.backward_weight(x, dy, false, dw, false, db);
  return {{values_of(y), values_of(dx), values_of(dw), values_of(db)}, values_of(rectified)};
}

class Winograd : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu_features().avx2 || !cpu_features().fma) GTEST_SKIP() << "no AVX2";
  }
};

// Tiles at both edges that are not whole, more of them than are taken at a time, and other numbers of channels.
TEST_F(Winograd, IsTheConvolutionByAnyNumberOfThreads) {
  const auto backend = make_cpu_backend(1);
  const std::int64_t height = 65, width = 62, in = 64, out = 96;
  const Tensor x = random_tensor(*backend, {1, height, width, in}, 1), w = random_tensor(*backend, {out, 3, 3, in}, 2);
  const Tensor b = random_tensor(*backend, {out}, 3), dy = random_tensor(*backend, {1, height, width, out}, 4);
  ASSERT_TRUE(WinogradConv::suits(x.shape(), w.shape(), kThree));
  ConvResults<double> wanted = plain_conv(x, w, b, dy, kThree);
  const Results alone = computed(1, x, w, b, dy);
  EXPECT_LT(distance_of(wanted.y, alone.conv.y), kNear);
  EXPECT_LT(distance_of(wanted.dx, alone.conv.dx), kNear);
  EXPECT_LT(distance_of(wanted.dw, alone.conv.dw), kNear);
  EXPECT_LT(distance_of(wanted.db, alone.conv.db), kNear);
  for (double& v : wanted.y) v = std::max(v, 0.0);
  EXPECT_LT(distance_of(wanted.y, alone.rectified), kNear);
  for (const int threads : {2, 3}) EXPECT_EQ(computed(threads, x, w, b, dy), alone) << threads << " threads";
}

TEST_F(Winograd, ReportsSupportedConvolutions) {
  const Shape x = {2, 16, 16, 64}, w = {96, 3, 3, 64};
  EXPECT_TRUE(WinogradConv::suits(x, w, kThree));
  EXPECT_FALSE(WinogradConv::suits({1, 16, 16, 64}, w, kThree)) << "sixteen tiles";
  EXPECT_FALSE(WinogradConv::suits({2, 16, 16, 32}, {96, 3, 3, 32}, kThree)) << "few channels";
  EXPECT_FALSE(WinogradConv::suits(x, {80, 3, 3, 64}, kThree)) << "no multiple of 32";
  EXPECT_FALSE(WinogradConv::suits(x, w, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}));
  EXPECT_FALSE(WinogradConv::suits(x, w, {.kernel = {3, 3}, .stride = {1, 1}, .padding = {0, 0}}));
  EXPECT_FALSE(WinogradConv::suits(x, {96, 1, 1, 64}, {.kernel = {1, 1}, .stride = {1, 1}, .padding = {0, 0}}));
}

// A NaN stays, and the other image has none.
TEST_F(Winograd, RectifiesNoNaN) {
  const auto backend = make_cpu_backend(1);
  const Tensor x = random_tensor(*backend, {2, 16, 16, 64}, 1), w = random_tensor(*backend, {64, 3, 3, 64}, 2);
  x.f32()[0] = std::nanf("");
  WinogradConv conv(backend->allocator(), nullptr);
  const Tensor y = backend->empty(x.shape());
  conv.forward(x, w, 1, Tensor(), true, y);
  EXPECT_TRUE(std::isnan(y.f32()[0]));
  for (std::int64_t i = 16 * 16 * 64; i < y.count(); ++i) ASSERT_GE(y.f32()[i], 0.0f) << i;
}

}  // namespace
}  // namespace lockstep::nn
