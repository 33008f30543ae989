// Convolutions in Winograd's way, our own, beside plain sums; tests of all kernels (kernels_test.cpp) have small ones.
#include "nn/ops/cpu/winograd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/cpu.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using cpu::WinogradConv;

constexpr Window kThree = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};

// Of the largest number: two to three times what is seen. The points 1 and 2 do not come as near.
constexpr double kNear = 5e-6;

struct Results {
  std::vector<float> y, rectified, dx, dw, db;
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
  return {values_of(y), values_of(rectified), values_of(dx), values_of(dw), values_of(db)};
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
  std::vector<double> y(static_cast<std::size_t>(dy.count())), dx(static_cast<std::size_t>(x.count())),
      dw(static_cast<std::size_t>(w.count())), db(out);
  for (std::int64_t row = 0; row < height; ++row)
    for (std::int64_t column = 0; column < width; ++column)
      for (std::int64_t o = 0; o < out; ++o) {
        const auto at_y = static_cast<std::size_t>((row * width + column) * out + o);
        const double gradient = at(dy, static_cast<std::int64_t>(at_y));
        db[static_cast<std::size_t>(o)] += gradient;
        double sum = at(b, o);
        for (std::int64_t tap = 0; tap < 9; ++tap) {
          const std::int64_t i = row + tap / 3 - 1, j = column + tap % 3 - 1;
          if (i < 0 || i >= height || j < 0 || j >= width) continue;
          const std::int64_t at_x = (i * width + j) * in, at_w = (o * 9 + tap) * in;
          for (std::int64_t c = 0; c < in; ++c) {
            sum += at(x, at_x + c) * at(w, at_w + c);
            dx[static_cast<std::size_t>(at_x + c)] += gradient * at(w, at_w + c);
            dw[static_cast<std::size_t>(at_w + c)] += gradient * at(x, at_x + c);
          }
        }
        y[at_y] = sum;
      }
  const Results alone = computed(1, x, w, b, dy);
  const auto near = [](const std::vector<double>& wanted, const std::vector<float>& made) {
    double worst = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      worst = std::max(worst, std::isfinite(made[i]) ? std::abs(wanted[i] - static_cast<double>(made[i])) : 1e9);
      largest = std::max(largest, std::abs(wanted[i]));
    }
    return worst / largest;
  };
  EXPECT_LT(near(y, alone.y), kNear);
  EXPECT_LT(near(dx, alone.dx), kNear);
  EXPECT_LT(near(dw, alone.dw), kNear);
  EXPECT_LT(near(db, alone.db), kNear);
  for (double& v : y) v = std::max(v, 0.0);
  EXPECT_LT(near(y, alone.rectified), kNear);
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
