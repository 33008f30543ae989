// Products of a few rows with packed weights, as recurrent layers take them.
#include "nn/ops/cpu/products.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST(Panels, AreProductsOfAnySize) {
  const auto backend = make_cpu_backend(1);
  for (const std::int64_t rows : {1, 2, 5, 6, 7, 8, 9, 16, 19})
    for (const std::int64_t depth : {1, 3, 255, 256, 300})
      for (const std::int64_t width : {1, 16, 31, 32}) {
        SCOPED_TRACE(fmt::format("{} rows of {} by {}", rows, depth, width));
        const Tensor a = random_tensor(*backend, {rows, depth + 3}, 1),
                     by_rows = random_tensor(*backend, {width, depth}, 2);
        const Tensor by_columns = backend->empty({depth, width}), panel = backend->empty({depth, cpu::kPanel});
        backend->pointwise().swap_last_axes(by_rows.reshaped({1, width, depth}), by_columns);
        const Tensor first = random_tensor(*backend, {rows, width + 5}, 3);
        std::vector<std::vector<float>> made;
        for (const bool columns : {false, true}) {
          for (float& v : panel.span<float>()) v = std::nanf("");
          if (columns)
            cpu::pack_columns(by_columns.f32(), width, width, depth, panel.f32());
          else
            cpu::pack_rows(by_rows.f32(), depth, width, depth, panel.f32());
          const Tensor c = backend->empty(first.shape());
          backend->pointwise().copy(first, c);
          cpu::add_product(a.f32(), depth + 3, rows, depth, panel.f32(), width, c.f32(), width + 5);
          made.push_back(values_of(c));
          for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < width + 5; ++i) {
              double sum = static_cast<double>(first.f32()[r * (width + 5) + i]);
              for (std::int64_t k = 0; k < depth && i < width; ++k)
                sum += static_cast<double>(a.f32()[r * (depth + 3) + k]) *
                       static_cast<double>(by_rows.f32()[i * depth + k]);
              ASSERT_NEAR(sum, static_cast<double>(c.f32()[r * (width + 5) + i]), i < width ? 2e-5 : 0.0)
                  << r << ", " << i;
            }
        }
        EXPECT_EQ(made[0], made[1]);
      }
}

// Both ways of packing have the same bits, and sums those of f32 but for their order.
TEST(Panels, OfBf16AreProductsOfAnySize) {
  if (!cpu::multiplies_pairs()) GTEST_SKIP() << "no AVX512-BF16";
  const auto backend = make_cpu_backend(1);
  const auto rounded = [&](const Shape& shape, std::uint64_t seed) {
    const Tensor made = backend->empty(shape, DType::kBF16);
    backend->pointwise().cast(random_tensor(*backend, shape, seed), made);
    return made;
  };
  const auto value = [](const Tensor& x, std::int64_t i) {
    return static_cast<double>(x.data<BFloat16>()[i].to_float());
  };
  for (const std::int64_t rows : {1, 2, 7, 8, 9, 19})
    for (const std::int64_t depth : {1, 2, 3, 64, 65, 511, 512, 513, 600})
      for (const std::int64_t width : {1, 16, 31, 32}) {
        SCOPED_TRACE(fmt::format("{} rows of {} by {}", rows, depth, width));
        const Tensor a = rounded({rows, depth + 3}, 1), by_rows = rounded({width, depth}, 2);
        const Tensor by_columns = backend->empty({depth, width}, DType::kBF16);
        backend->pointwise().swap_last_axes(by_rows.reshaped({1, width, depth}), by_columns);
        // What follows a row and lies in the same pair contributes nothing, not even NaN.
        for (std::int64_t r = 0; r < rows; ++r)
          a.data<BFloat16>()[r * (depth + 3) + depth] = BFloat16::from_float(std::nanf(""));
        const Tensor panel = backend->empty({cpu::panel_size<BFloat16>(depth)}, DType::kBF16);
        const Tensor first = random_tensor(*backend, {rows, width + 5}, 3), c = backend->empty(first.shape());
        std::vector<std::vector<float>> made;
        for (const bool columns : {false, true}) {
          backend->pointwise().fill(panel, std::nanf(""));
          if (columns)
            cpu::pack_columns(by_columns.data<BFloat16>(), width, width, depth, panel.data<BFloat16>());
          else
            cpu::pack_rows(by_rows.data<BFloat16>(), depth, width, depth, panel.data<BFloat16>());
          backend->pointwise().copy(first, c);
          cpu::add_product(a.data<BFloat16>(), depth + 3, rows, depth, panel.data<BFloat16>(), width, c.f32(),
                           width + 5);
          made.push_back(values_of(c));
        }
        EXPECT_EQ(made[0], made[1]);
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t i = 0; i < width + 5; ++i) {
            double sum = static_cast<double>(first.f32()[r * (width + 5) + i]);
            for (std::int64_t k = 0; k < depth && i < width; ++k)
              sum += value(a, r * (depth + 3) + k) * value(by_rows, i * depth + k);
            ASSERT_NEAR(sum, static_cast<double>(c.f32()[r * (width + 5) + i]), i < width ? 4e-5 : 0.0)
                << r << ", " << i;
          }
      }
}

}  // namespace
}  // namespace lockstep::nn
