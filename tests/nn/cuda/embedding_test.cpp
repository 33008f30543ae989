// CUDA's embeddings against the CPU's.
#include <array>
#include <cstring>

#include "base/error.h"
#include "nn/ops/cuda/own_kernels.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaEmbedding : public DeviceTest {
 protected:
  Tensor numbers_of(const std::vector<std::int32_t>& values, const Shape& shape) {
    const Tensor made = cpu->empty(shape, DType::kI32);
    std::copy(values.begin(), values.end(), made.data<std::int32_t>());
    return made;
  }
  // `half`: every other one is the same.
  std::vector<std::int32_t> some_numbers(std::int64_t count, std::int64_t rows, bool half) {
    SplitMix64 random(static_cast<std::uint64_t>(count));
    std::vector<std::int32_t> made(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < made.size(); ++i) {
      const auto number = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(rows)));
      made[i] = half && i % 2 == 1 ? static_cast<std::int32_t>(rows / 2) : number;
    }
    return made;
  }

  std::unique_ptr<EmbeddingKernels> embedding = cuda::make_embedding_kernels(context);
};

struct Case {
  std::int64_t rows, columns, count;
  bool half;
};
// Vocabularies of one digit, two and three; runs of one token over many pieces; the widths of an access and around.
const Case kEmbeddingCases[] = {{1, 1, 1, false},     {5, 19, 6, false},      {3, 8, 16, false},
                                {3, 8, 17, false},    {11, 4, 33, true},      {256, 64, 1500, true},
                                {50257, 3, 70, true}, {300000, 1, 50, false}, {7, 132, 300, true},
                                {20, 33, 0, false},   {1, 5, 2100, false},    {513, 40, 1024, false}};

TEST_P(CudaEmbedding, Forward) {
  for (const auto& [rows, columns, count, half] : kEmbeddingCases) {
    SCOPED_TRACE(fmt::format("{} of ({}, {})", count, rows, columns));
    const Operand table = activations(random({rows, columns}, 1));
    const Operand numbers = plains(numbers_of(some_numbers(count, rows, half), {count}));
    compare(cpu->embedding(), *embedding, {activation_like({count, columns})}, {kSame},
            [&](auto& on, Side at, const auto& out) { on.forward(at(table), at(numbers), out[0]); });
  }
}

TEST_P(CudaEmbedding, Rotate) {
  for (const auto& [batch, tokens, heads, half] :
       {std::array<std::int64_t, 4>{1, 1, 1, 1}, {2, 3, 2, 4}, {3, 5, 1, 33}, {0, 3, 2, 4}, {2, 70, 3, 16}})
    for (const bool back : {false, true}) {
      SCOPED_TRACE(fmt::format("{} of {} tokens, {} heads of {}", batch, tokens, heads, 2 * half));
      const Operand cosines = plains(random_tensor(*cpu, {tokens + 2, half}, 1));
      const Operand sines = plains(random_tensor(*cpu, {tokens + 2, half}, 2));
      Operand x = activations(random({batch, tokens, 2 * heads * half}, 3));
      compare(
          cpu->embedding(), *embedding, {activation_like(x.host.shape())}, {{type(), 2.0}},
          [&](auto& on, Side at, const auto& out) { on.rotate(at(x), at(cosines), at(sines), 2, back, out[0]); }, &x);
    }
}

TEST_P(CudaEmbedding, IndicesOutsideOfTheTableAreNaN) {
  const Tensor table_host = random({4, 24}, 1), table = activation(table_host);
  const Tensor numbers = plain(numbers_of({3, -1, 0, 4, 2147483647, -2147483647 - 1, 2}, {7}));
  const auto got =
      results({activation_like({7, 24})}, [&](const auto& out) { embedding->forward(table, numbers, out[0]); });
  const std::int64_t wanted[] = {3, -1, 0, -1, -1, -1, 2};
  for (std::int64_t i = 0; i < got[0].count(); ++i) {
    const std::int64_t row = wanted[i / 24];
    if (row < 0)
      EXPECT_TRUE(std::isnan(got[0].f32()[i])) << i;
    else
      EXPECT_EQ(got[0].f32()[i], table_host.f32()[row * 24 + i % 24]) << i;
  }
  // Their gradients go nowhere.
  const Tensor dy_host = random({7, 24}, 2), dy = activation(dy_host), expected = cpu->zeros({4, 24});
  for (std::int64_t i = 0; i < dy_host.count(); ++i)
    if (wanted[i / 24] >= 0) expected.f32()[wanted[i / 24] * 24 + i % 24] = dy_host.f32()[i];
  const auto gradient = results({{{4, 24}}}, [&](const auto& out) { embedding->backward(numbers, dy, false, out[0]); });
  expect_same(expected, gradient[0]);
}

TEST_P(CudaEmbedding, Backward) {
  for (const auto& [rows, columns, count, half] : kEmbeddingCases)
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("{} of ({}, {}), accumulate {}", count, rows, columns, accumulate));
      const Operand dy = activations(random({count, columns}, 1));
      const Operand numbers = plains(numbers_of(some_numbers(count, rows, half), {count}));
      // The CPU adds up the rows of a token one by one.
      compare(
          cpu->embedding(), *embedding, {{{rows, columns}, DType::kF32, random_tensor(*cpu, {rows, columns}, 2)}},
          {{DType::kF32, 8.0 + static_cast<double>(count) / 8.0}},
          [&, add = accumulate](auto& on, Side at, const auto& out) { on.backward(at(numbers), at(dy), add, out[0]); });
    }
}

// Tokens in order, and equal ones in the order of the text.
TEST_P(CudaEmbedding, TokensAreSortedAndStayInOrder) {
  for (const auto& [rows, columns, count, half] : kEmbeddingCases) {
    if (count == 0) continue;
    const auto numbers = some_numbers(count, rows, half);
    const Tensor order = cuda::sort_tokens(context, plain(numbers_of(numbers, {count})), rows);
    const auto bytes = download(order);
    const auto* const places = reinterpret_cast<const cuda::TokenPlace*>(bytes.data());
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(places[i].token, numbers[static_cast<std::size_t>(places[i].place)]) << i;
      if (i == 0) continue;
      ASSERT_TRUE(places[i - 1].token < places[i].token ||
                  (places[i - 1].token == places[i].token && places[i - 1].place < places[i].place))
          << i;
    }
  }
}

struct Positions {
  std::int64_t batch, tokens, columns, first, rows;
};
const Positions kPositions[] = {{1, 1, 1, 0, 1},   {2, 3, 5, 2, 6}, {3, 7, 64, 0, 7}, {9, 4, 40, 1, 8},
                                {200, 2, 8, 0, 5}, {0, 3, 4, 0, 3}, {2, 0, 4, 1, 3},  {1, 33, 24, 3, 40}};

TEST_P(CudaEmbedding, AddRows) {
  for (const auto& [batch, tokens, columns, first, rows] : kPositions) {
    SCOPED_TRACE(fmt::format("({}, {}, {})", batch, tokens, columns));
    const Shape shape = {batch, tokens, columns};
    const Operand x = activations(random(shape, 1)), table = activations(random({rows, columns}, 2));
    const auto apart =
        compare(cpu->embedding(), *embedding, {activation_like(shape)}, {kSame},
                [&, from = first](auto& on, Side at, const auto& out) { on.add_rows(at(x), at(table), from, out[0]); });
    const auto in_place = results({activation_like(shape, x.host)}, [&, from = first](const auto& out) {
      embedding->add_rows(out[0], table.device, from, out[0]);
    });
    expect_same(apart.expected[0], in_place[0]);
  }
}

TEST_P(CudaEmbedding, AddRowsBackward) {
  for (const auto& [batch, tokens, columns, first, rows] : kPositions)
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("({}, {}, {}), accumulate {}", batch, tokens, columns, accumulate));
      const Operand dy = activations(random({batch, tokens, columns}, 1));
      compare(cpu->embedding(), *embedding, {{{rows, columns}, DType::kF32, random_tensor(*cpu, {rows, columns}, 2)}},
              {{DType::kF32, 8.0 + static_cast<double>(batch) / 8.0}},
              [&, from = first, add = accumulate](auto& on, Side at, const auto& out) {
                on.add_rows_backward(at(dy), from, add, out[0]);
              });
    }
}

TEST_P(CudaEmbedding, RowIndices) {
  const auto indices = [&](const Shape& shape, const std::vector<std::int32_t>& positions, std::int64_t position,
                           std::int64_t rows) {
    const Operand given = plains(positions.empty() ? Tensor() : numbers_of(positions, shape));
    const auto both =
        compare(cpu->embedding(), *embedding, {{shape, DType::kI32}}, {kSame},
                [&](auto& on, Side at, const auto& out) { on.row_indices(at(given), position, rows, out[0]); });
    const auto made = both.got[0].span<std::int32_t>();
    return std::vector<std::int32_t>(made.begin(), made.end());
  };
  EXPECT_EQ(indices({2, 3}, {4, 0, 2, 1, 1, 3}, 0, 5), (std::vector<std::int32_t>{4, 0, 2, 6, 6, 8}));
  EXPECT_EQ(indices({2, 2}, {-1, 4, 5, 0}, 0, 5), (std::vector<std::int32_t>{-1, 4, -1, 5}));
  EXPECT_EQ(indices({3}, {}, 2, 4), (std::vector<std::int32_t>{2, 6, 10}));
  EXPECT_EQ(indices({700}, {}, 0, 3).back(), 699 * 3);
}

INSTANTIATE_TEST_SUITE_P(, CudaEmbedding, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
