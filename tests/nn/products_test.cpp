// Products of whole matrices, as they are computed where oneDNN computes with AVX2.
#include "nn/ops/cpu/products.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/cpu.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

/// c, before which it held `first` where that is added to, by `threads`.
std::vector<float> columns_of(int threads, const Tensor& a, const Tensor& b, const Tensor& first, bool accumulate) {
  const auto backend = make_cpu_backend(threads);
  const Tensor c = backend->empty(first.shape());
  backend->pointwise().copy(first, c);
  cpu::multiply_columns(a.f32(), b.f32(), a.size(0), a.size(1), b.size(1), accumulate, c.f32(), backend->allocator());
  return values_of(c);
}

/// (depth, m, n)
constexpr std::array<std::int64_t, 3> kProductSizes[] = {{1, 1, 1},      {3, 7, 5},      {256, 6, 16},  {257, 13, 33},
                                                         {64, 10, 1024}, {600, 151, 40}, {20, 5, 1030}, {20, 1030, 5}};

TEST(ColumnProducts, AreSumsOverRows) {
  if (!cpu_features().avx2 || !cpu_features().fma) GTEST_SKIP() << "no AVX2";
  const auto backend = make_cpu_backend(1);
  for (const auto& [depth, m, n] : kProductSizes) {
    SCOPED_TRACE(fmt::format("({}, {}) and ({}, {})", depth, m, depth, n));
    const Tensor a = random_tensor(*backend, {depth, m}, 1), b = random_tensor(*backend, {depth, n}, 2),
                 first = random_tensor(*backend, {m, n}, 3);
    for (const bool accumulate : {false, true}) {
      const std::vector<float> made = columns_of(1, a, b, first, accumulate);
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          const std::int64_t at = i * n + j;
          double sum = accumulate ? static_cast<double>(first.f32()[at]) : 0.0;
          for (std::int64_t k = 0; k < depth; ++k)
            sum += static_cast<double>(a.f32()[k * m + i]) * static_cast<double>(b.f32()[k * n + j]);
          ASSERT_NEAR(sum, static_cast<double>(made[static_cast<std::size_t>(at)]), 5e-5) << i << ", " << j;
        }
      for (const int threads : {2, 3}) EXPECT_EQ(columns_of(threads, a, b, first, accumulate), made);
    }
  }
}

/// a · b + bias, bias of no elements: none.
std::vector<float> rows_of(int threads, const Tensor& a, const Tensor& b, bool b_in_columns, const Tensor& bias,
                           std::int64_t n) {
  const auto backend = make_cpu_backend(threads);
  const Tensor c = backend->empty({a.size(0), n});
  cpu::multiply_rows(a.f32(), b.f32(), b_in_columns, bias.count() > 0 ? bias.f32() : nullptr, a.size(1), a.size(0), n,
                     c.f32(), backend->allocator());
  return values_of(c);
}

TEST(RowProducts, AreSumsOverDepth) {
  if (!cpu_features().avx2 || !cpu_features().fma) GTEST_SKIP() << "no AVX2";
  const auto backend = make_cpu_backend(1);
  for (const auto& [depth, m, n] : kProductSizes)
    for (const bool b_in_columns : {false, true})
      for (const bool with_bias : {false, true}) {
        SCOPED_TRACE(fmt::format("({}, {}) and {} of {}", m, depth, n, b_in_columns ? "columns" : "rows"));
        const Tensor a = random_tensor(*backend, {m, depth}, 1),
                     b = random_tensor(*backend, b_in_columns ? Shape{depth, n} : Shape{n, depth}, 2),
                     bias = random_tensor(*backend, {with_bias ? n : 0}, 3);
        const std::vector<float> made = rows_of(1, a, b, b_in_columns, bias, n);
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < n; ++j) {
            double sum = with_bias ? static_cast<double>(bias.f32()[j]) : 0.0;
            for (std::int64_t k = 0; k < depth; ++k)
              sum += static_cast<double>(a.f32()[i * depth + k]) *
                     static_cast<double>(b.f32()[b_in_columns ? k * n + j : j * depth + k]);
            ASSERT_NEAR(sum, static_cast<double>(made[static_cast<std::size_t>(i * n + j)]), 5e-5) << i << ", " << j;
          }
        for (const int threads : {2, 3}) EXPECT_EQ(rows_of(threads, a, b, b_in_columns, bias, n), made);
        // A row's sums do not depend on how many rows there are.
        const Tensor first = a.slice(0, 1);
        const std::vector<float> alone = rows_of(1, first, b, b_in_columns, bias, n);
        EXPECT_EQ(alone, std::vector<float>(made.begin(), made.begin() + n));
      }
}

}  // namespace
}  // namespace lockstep::nn
