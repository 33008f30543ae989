// Products of matrices with few vectors, and vectors that become orthonormal.
#include "ddp/hooks/compression.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace lockstep::ddp {
namespace {

std::vector<float> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(LowRank, ProductsMatchPlainLoops) {
  for (const auto& [rows, columns, rank] :
       {LowRank{1, 1, 1}, LowRank{5, 3, 2}, LowRank{17, 130, 4}, LowRank{64, 33, 7}}) {
    const LowRank shape{rows, columns, rank};
    const auto m = random_numbers(rows * columns, 1), q = random_numbers(rank * columns, 2),
               p = random_numbers(rank * rows, 3);
    std::vector<float> mq(rank * rows), mp(rank * columns), pq(rows * columns), e(rows * columns);
    times(shape, m.data(), q.data(), mq.data());
    transposed_times(shape, m.data(), p.data(), mp.data());
    expand(shape, p.data(), q.data(), pq.data());
    residual(shape, m.data(), p.data(), q.data(), e.data());
    for (std::size_t k = 0; k < rank; ++k) {
      for (std::size_t i = 0; i < rows; ++i) {
        double sum = 0;
        for (std::size_t j = 0; j < columns; ++j) sum += static_cast<double>(m[i * columns + j] * q[k * columns + j]);
        EXPECT_NEAR(mq[k * rows + i], sum, 1e-4);
      }
      for (std::size_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (std::size_t i = 0; i < rows; ++i) sum += static_cast<double>(m[i * columns + j] * p[k * rows + i]);
        EXPECT_NEAR(mp[k * columns + j], sum, 1e-4);
      }
    }
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (std::size_t k = 0; k < rank; ++k) sum += static_cast<double>(p[k * rows + i] * q[k * columns + j]);
        EXPECT_NEAR(pq[i * columns + j], sum, 1e-4);
        EXPECT_NEAR(e[i * columns + j], static_cast<double>(m[i * columns + j]) - sum, 1e-4);
      }
  }
}

double dot(const std::vector<float>& v, std::size_t a, std::size_t b, std::size_t length) {
  double sum = 0;
  for (std::size_t i = 0; i < length; ++i)
    sum += static_cast<double>(v[a * length + i]) * static_cast<double>(v[b * length + i]);
  return sum;
}

TEST(LowRank, VectorsBecomeOrthonormal) {
  constexpr std::size_t kLength = 37;
  auto v = random_numbers(4 * kLength, 5);
  for (std::size_t i = 0; i < kLength; ++i) {
    v[kLength + i] = v[i] * 1e-20f;                          // depends on the first
    v[2 * kLength + i] = v[i] + 1e-3f * v[3 * kLength + i];  // nearly
  }
  auto random = v;
  orthonormalize(random.data(), 4, kLength, Dependent::kRandom, 9);
  for (std::size_t a = 0; a < 4; ++a)
    for (std::size_t b = 0; b < 4; ++b) EXPECT_NEAR(dot(random, a, b, kLength), a == b ? 1 : 0, 1e-5) << a << " " << b;
  auto zero = v;
  orthonormalize(zero.data(), 4, kLength, Dependent::kZero, 9);
  EXPECT_EQ(dot(zero, 1, 1, kLength), 0);
  EXPECT_NEAR(dot(zero, 2, 2, kLength), 1, 1e-5);
}

TEST(LowRank, OfFewerNumbersThanVectors) {
  std::vector<float> v(6, 0.0f);  // three vectors of two numbers
  orthonormalize(v.data(), 3, 2, Dependent::kRandom, 1);
  EXPECT_NEAR(dot(v, 0, 0, 2), 1, 1e-5);
  EXPECT_NEAR(dot(v, 0, 1, 2), 0, 1e-5);
  EXPECT_EQ(dot(v, 2, 2, 2), 0);
}

TEST(LowRank, NansStay) {
  std::vector<float> v = {1, 2, 3, std::nanf(""), 1, 1};
  orthonormalize(v.data(), 2, 3, Dependent::kRandom, 1);
  EXPECT_FALSE(std::isnan(v[0]));
  EXPECT_TRUE(std::isnan(v[4]));
}

}  // namespace
}  // namespace lockstep::ddp
