#include "nn/ops/cpu/column_moments.h"

#include <algorithm>
#include <array>

#include "base/cpu.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kTile = 32;      // columns: two cache lines
constexpr std::int64_t kRows = 128;     // of a block, summed in f32
constexpr std::int64_t kGrain = 16384;  // elements that are worth a thread
using Tile = std::array<float, kTile>;
using WideTile = std::array<double, kTile>;

LOCKSTEP_SIMD_CLONES
void add_block(const float* x, std::int64_t rows, std::int64_t stride, std::int64_t width, float* sum) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) sum[c] += x[r * stride + c];
}

LOCKSTEP_SIMD_CLONES
void add_squares_of_block(const float* x, const float* mean, std::int64_t rows, std::int64_t stride, std::int64_t width,
                          float* sum) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const float apart = x[r * stride + c] - mean[c];
      sum[c] += apart * apart;
    }
}

LOCKSTEP_SIMD_CLONES
void add_products_of_block(const float* x, const float* dy, const float* mean, std::int64_t rows, std::int64_t stride,
                           std::int64_t width, float* products, float* sums) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const float gradient = dy[r * stride + c];
      products[c] += gradient * (x[r * stride + c] - mean[c]);
      sums[c] += gradient;
    }
}

LOCKSTEP_SIMD_CLONES
void spread_rows(const float* x, const float* dy, const float* mean, const float* scale, const float* offset,
                 const float* slope, std::int64_t rows, std::int64_t columns, float* dx) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t i = r * columns + c;
      dx[i] = scale[c] * (dy[i] - offset[c] - (x[i] - mean[c]) * slope[c]);
    }
}

// Calls body(first column, number of columns) for all tiles, on the compute threads.
template <class Body>
void for_tiles(std::int64_t rows, std::int64_t columns, const Body& body) {
  const std::int64_t tiles = (columns + kTile - 1) / kTile;
  parallel_for(tiles, std::max<std::int64_t>(1, kGrain / (std::max<std::int64_t>(1, rows) * kTile)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t t = begin; t < end; ++t) body(t * kTile, std::min(kTile, columns - t * kTile));
               });
}

// Calls body(first row, number of rows) for all blocks.
template <class Body>
void for_blocks(std::int64_t rows, const Body& body) {
  for (std::int64_t r = 0; r < rows; r += kRows) body(r, std::min(kRows, rows - r));
}

void add_to(WideTile& sums, const Tile& block) {
  for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += static_cast<double>(block[c]);
}

}  // namespace

void column_moments(const float* x, std::int64_t rows, std::int64_t columns, float* mean, float* squares) {
  for_tiles(rows, columns, [&](std::int64_t first, std::int64_t width) {
    const auto n = static_cast<std::size_t>(width);
    WideTile sums{};
    for_blocks(rows, [&](std::int64_t r, std::int64_t count) {
      Tile block{};
      add_block(x + r * columns + first, count, columns, width, block.data());
      add_to(sums, block);
    });
    const double share = rows > 0 ? 1.0 / static_cast<double>(rows) : 0.0;
    for (std::size_t c = 0; c < n; ++c)
      mean[first + static_cast<std::int64_t>(c)] = static_cast<float>(sums[c] * share);
    sums = {};
    for_blocks(rows, [&](std::int64_t r, std::int64_t count) {
      Tile block{};
      add_squares_of_block(x + r * columns + first, mean + first, count, columns, width, block.data());
      add_to(sums, block);
    });
    for (std::size_t c = 0; c < n; ++c) squares[first + static_cast<std::int64_t>(c)] = static_cast<float>(sums[c]);
  });
}

void column_products(const float* x, const float* dy, const float* mean, std::int64_t rows, std::int64_t columns,
                     float* products, float* sums) {
  for_tiles(rows, columns, [&](std::int64_t first, std::int64_t width) {
    WideTile wide_products{}, wide_sums{};
    for_blocks(rows, [&](std::int64_t r, std::int64_t count) {
      Tile block{}, sum{};
      const std::int64_t at = r * columns + first;
      add_products_of_block(x + at, dy + at, mean + first, count, columns, width, block.data(), sum.data());
      add_to(wide_products, block);
      add_to(wide_sums, sum);
    });
    for (std::int64_t c = 0; c < width; ++c) {
      products[first + c] = static_cast<float>(wide_products[static_cast<std::size_t>(c)]);
      sums[first + c] = static_cast<float>(wide_sums[static_cast<std::size_t>(c)]);
    }
  });
}

void spread_columns(const float* x, const float* dy, const float* mean, const float* scale, const float* offset,
                    const float* slope, std::int64_t rows, std::int64_t columns, float* dx) {
  parallel_for(rows, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, columns)),
               [&](std::int64_t begin, std::int64_t end) {
                 const std::int64_t at = begin * columns;
                 spread_rows(x + at, dy + at, mean, scale, offset, slope, end - begin, columns, dx + at);
               });
}

}  // namespace lockstep::nn::cpu
