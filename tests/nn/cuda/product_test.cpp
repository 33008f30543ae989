// Products of row-major matrices as column-major ones: carried out as described, they are what was meant.
#include "nn/ops/cuda/product.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace lockstep::nn::cuda {
namespace {

using Numbers = std::vector<std::int64_t>;

Numbers some(std::int64_t count, std::int64_t seed) {
  Numbers made;
  for (std::int64_t i = 0; i < count; ++i) made.push_back((i * i * 7 + i * 13 + seed) % 19 - 9);
  return made;
}

// As the library does it: element (row, column) of a matrix is number row + column · pitch.
Numbers carry_out(const Product& product, const Numbers& a, const Numbers& b) {
  const auto element = [](const Numbers& numbers, const ColumnMajor& matrix, bool turn, std::int64_t row,
                          std::int64_t column) {
    if (turn) std::swap(row, column);
    EXPECT_LT(row, matrix.rows);
    EXPECT_LT(column, matrix.columns);
    return numbers.at(static_cast<std::size_t>(row + column * matrix.pitch));
  };
  const std::int64_t inner = product.turn_a ? product.a.rows : product.a.columns;
  EXPECT_EQ(inner, product.turn_b ? product.b.columns : product.b.rows);
  EXPECT_EQ(product.d.rows, product.turn_a ? product.a.columns : product.a.rows);
  EXPECT_EQ(product.d.columns, product.turn_b ? product.b.rows : product.b.columns);
  Numbers d(static_cast<std::size_t>(product.d.pitch * product.d.columns));
  for (std::int64_t row = 0; row < product.d.rows; ++row)
    for (std::int64_t column = 0; column < product.d.columns; ++column)
      for (std::int64_t k = 0; k < inner; ++k)
        d[static_cast<std::size_t>(row + column * product.d.pitch)] +=
            element(a, product.a, product.turn_a, row, k) * element(b, product.b, product.turn_b, k, column);
  return d;
}

Numbers with_pitch(const Numbers& rows, std::int64_t columns, std::int64_t pitch) {
  Numbers made;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    made.push_back(rows[i]);
    if ((static_cast<std::int64_t>(i) + 1) % columns == 0)
      made.resize(made.size() + static_cast<std::size_t>(pitch - columns));
  }
  return made;
}

TEST(Product, IsTheOneOfRowMajorMatrices) {
  for (const auto& [n, in, out] : {std::array<std::int64_t, 3>{2, 3, 5}, {1, 4, 3}, {5, 1, 2}, {3, 2, 1}, {4, 4, 4}}) {
    const Numbers x = some(n * in, 1), w = some(out * in, 2), dy = some(n * out, 3);
    Numbers y(static_cast<std::size_t>(n * out)), dx(static_cast<std::size_t>(n * in)),
        dw(static_cast<std::size_t>(out * in));
    for (std::int64_t s = 0; s < n; ++s)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t i = 0; i < in; ++i) {
          const auto at_x = static_cast<std::size_t>(s * in + i), at_w = static_cast<std::size_t>(o * in + i),
                     at_y = static_cast<std::size_t>(s * out + o);
          y[at_y] += x[at_x] * w[at_w];
          dx[at_x] += dy[at_y] * w[at_w];
          dw[at_w] += dy[at_y] * x[at_x];
        }
    for (const std::int64_t pitch : {out, out + 3}) {
      EXPECT_EQ(carry_out(forward_product(n, in, out, pitch), w, x), with_pitch(y, out, pitch));
      EXPECT_EQ(carry_out(backward_input_product(n, in, out, pitch), w, with_pitch(dy, out, pitch)), dx);
      EXPECT_EQ(carry_out(backward_weight_product(n, in, out, pitch), x, with_pitch(dy, out, pitch)), dw);
    }
  }
}

TEST(Product, PitchesAreMultiplesOf16BytesAndOf128WhereThatIsLittle) {
  EXPECT_EQ(pitch_of_rows(50257, 2), 50304);
  EXPECT_EQ(pitch_of_rows(50257, 4), 50272);
  EXPECT_EQ(pitch_of_rows(65, 2), 72);
  EXPECT_EQ(pitch_of_rows(65, 4), 68);
  EXPECT_EQ(pitch_of_rows(1, 2), 8);
  for (const std::int64_t whole : {64, 768, 2304}) EXPECT_EQ(pitch_of_rows(whole, 2), whole);
}

TEST(Product, AlignmentIsThatOfTheAddressUpTo256) {
  EXPECT_EQ(alignment_of(std::uintptr_t{0}), 256U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1000}), 256U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1100}), 256U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1180}), 128U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1010}), 16U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1004}), 4U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1102}), 2U);
  EXPECT_EQ(alignment_of(std::uintptr_t{0x1101}), 1U);
}

}  // namespace
}  // namespace lockstep::nn::cuda
