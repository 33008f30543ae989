#include "nn/ops/cpu/column_moments.h"

#include <algorithm>
#include <array>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kTile = 512;     // columns whose sums are held at a time
constexpr std::int64_t kBlock = 16384;  // elements of a block: a part of the nearest cache but one
constexpr std::int64_t kChunk = 65536;  // elements that are worth a thread
constexpr std::int64_t kMostChunks = 32;
using Tile = std::array<float, kTile>;
using WideTile = std::array<double, kTile>;

// sum[c] += Σ x[r][c], four rows at a time.
template <class T>
LOCKSTEP_SIMD_CLONES void add_block(const T* __restrict x, std::int64_t rows, std::int64_t stride, std::int64_t width,
                                    float* __restrict sum) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T *const a = x + r * stride, *const b = a + stride, *const d = b + stride, *const e = d + stride;
    for (std::int64_t c = 0; c < width; ++c) sum[c] += (wide(a[c]) + wide(b[c])) + (wide(d[c]) + wide(e[c]));
  }
  for (; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) sum[c] += wide(x[r * stride + c]);
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_squares_of_block(const T* __restrict x, const float* __restrict mean, std::int64_t rows,
                                               std::int64_t stride, std::int64_t width, float* __restrict sum) {
  std::int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    const T *const a = x + r * stride, *const b = a + stride;
    for (std::int64_t c = 0; c < width; ++c) {
      const float first = wide(a[c]) - mean[c], second = wide(b[c]) - mean[c];
      sum[c] += first * first + second * second;
    }
  }
  for (; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const float apart = wide(x[r * stride + c]) - mean[c];
      sum[c] += apart * apart;
    }
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_products_of_block(const T* __restrict x, const T* __restrict dy,
                                                const float* __restrict mean, std::int64_t rows, std::int64_t stride,
                                                std::int64_t width, float* __restrict products,
                                                float* __restrict sums) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const float gradient = wide(dy[r * stride + c]);
      products[c] += gradient * (wide(x[r * stride + c]) - mean[c]);
      sums[c] += gradient;
    }
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_masked_products_of_block(const T* __restrict x, const T* __restrict y, T* __restrict dy,
                                                       const float* __restrict mean, float top, std::int64_t rows,
                                                       std::int64_t stride, std::int64_t width,
                                                       float* __restrict products, float* __restrict sums) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t i = r * stride + c;
      const float result = wide(y[i]);
      const bool open = result > 0.0f && result < top;
      const float gradient = open ? wide(dy[i]) : 0.0f;
      dy[i] = keep_if(open, dy[i]);
      products[c] += gradient * (wide(x[i]) - mean[c]);
      sums[c] += gradient;
    }
}

template <class T>
LOCKSTEP_SIMD_CLONES void normalise_rows(const T* __restrict x, const float* __restrict mean,
                                         const float* __restrict scale, const float* __restrict shift,
                                         std::int64_t rows, std::int64_t columns, T* __restrict y) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      y[r * columns + c] = narrow<T>((wide(x[r * columns + c]) - mean[c]) * scale[c] + shift[c]);
}

template <class T>
LOCKSTEP_SIMD_CLONES void normalise_rows_relu(const T* __restrict x, const float* __restrict mean,
                                              const float* __restrict scale, const float* __restrict shift, float top,
                                              std::int64_t rows, std::int64_t columns, T* __restrict y) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const float v = (wide(x[r * columns + c]) - mean[c]) * scale[c] + shift[c];
      const float positive = v < 0.0f ? 0.0f : v;  // this way round NaN passes
      y[r * columns + c] = narrow<T>(positive > top ? top : positive);
    }
}

template <class T>
LOCKSTEP_SIMD_CLONES void normalise_rows_add_relu(const T* __restrict x, const T* __restrict residual,
                                                  const float* __restrict mean, const float* __restrict scale,
                                                  const float* __restrict shift, std::int64_t rows,
                                                  std::int64_t columns, T* __restrict y) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t i = r * columns + c;
      const float v = (wide(x[i]) - mean[c]) * scale[c] + shift[c] + wide(residual[i]);
      y[i] = narrow<T>(v < 0.0f ? 0.0f : v);
    }
}

template <class T>
LOCKSTEP_SIMD_CLONES void grad_input_rows(const T* x, const T* dy, const float* __restrict mean,
                                          const float* __restrict scale, const float* __restrict offset,
                                          const float* __restrict slope, std::int64_t rows, std::int64_t columns,
                                          T* dx) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T *const from = x + r * columns, *const gradient = dy + r * columns;
    T* const to = dx + r * columns;
#pragma GCC ivdep  // dx is dy, or apart from it
    for (std::int64_t c = 0; c < columns; ++c)
      to[c] = narrow<T>(scale[c] * (wide(gradient[c]) - offset[c] - (wide(from[c]) - mean[c]) * slope[c]));
  }
}

std::int64_t chunks_of(std::int64_t rows, std::int64_t columns) {
  return std::clamp<std::int64_t>(rows * columns / kChunk, 1, std::clamp<std::int64_t>(rows, 1, kMostChunks));
}

// Calls body(chunk, first row, end, first column, width) for every chunk of rows and tile of columns.
template <class Body>
void for_pieces(std::int64_t rows, std::int64_t columns, const Body& body) {
  const std::int64_t tiles = (columns + kTile - 1) / kTile, chunks = chunks_of(rows, columns);
  parallel_for(chunks * tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t chunk = i / tiles, first = i % tiles * kTile;
      body(chunk, rows * chunk / chunks, rows * (chunk + 1) / chunks, first, std::min(kTile, columns - first));
    }
  });
}

// Calls body(first row, number of rows) for the blocks of a chunk.
template <class Body>
void for_blocks(std::int64_t begin, std::int64_t end, std::int64_t width, const Body& body) {
  const std::int64_t block = std::max<std::int64_t>(8, kBlock / width);
  for (std::int64_t r = begin; r < end; r += block) body(r, std::min(block, end - r));
}

// Columns [begin, end).
template <class T>
LOCKSTEP_SIMD_CLONES void sum_rows_of_some(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t begin,
                                           std::int64_t end, bool accumulate, float* sums) {
  const std::int64_t some = end - begin;
  if (!accumulate)
    for (std::int64_t c = 0; c < some; ++c) sums[begin + c] = 0.0f;
  float* out = sums + begin;
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * columns + begin;
    for (std::int64_t c = 0; c < some; ++c) out[c] += wide(row[c]);
  }
}

}  // namespace

template <class T>
void sum_rows(const T* x, std::int64_t rows, std::int64_t columns, bool accumulate, float* sums) {
  constexpr std::int64_t kGrain = 256;  // columns a thread, so that no two threads write one cache line
  parallel_for((columns + 15) / 16, kGrain / 16, [&](std::int64_t begin, std::int64_t end) {
    sum_rows_of_some(x, rows, columns, begin * 16, std::min(end * 16, columns), accumulate, sums);
  });
}

void join_columns(double count, double more, double part_mean, double part_squares, double& mean, double& squares) {
  const double apart = part_mean - mean, share = more / (count + more);
  mean += apart * share;
  squares += part_squares + apart * apart * count * share;
}

template <class T>
void ColumnSums::moments(const T* x, std::int64_t rows, std::int64_t columns, float* mean, float* squares) {
  const std::int64_t chunks = chunks_of(rows, columns);
  parts_.resize(static_cast<std::size_t>(2 * chunks * columns));
  for_pieces(rows, columns,
             [&](std::int64_t chunk, std::int64_t begin, std::int64_t end, std::int64_t first, std::int64_t width) {
               double *const means = parts_.data() + 2 * chunk * columns + first, *const spread = means + columns;
               std::fill_n(means, width, 0.0);
               std::fill_n(spread, width, 0.0);
               for_blocks(begin, end, width, [&](std::int64_t r, std::int64_t count) {
                 Tile block_mean, block_squares;
                 std::fill_n(block_mean.begin(), width, 0.0f);
                 std::fill_n(block_squares.begin(), width, 0.0f);
                 const T* const from = x + r * columns + first;
                 add_block(from, count, columns, width, block_mean.data());
                 const float one_of = 1.0f / static_cast<float>(count);
                 for (std::int64_t c = 0; c < width; ++c) block_mean[static_cast<std::size_t>(c)] *= one_of;
                 add_squares_of_block(from, block_mean.data(), count, columns, width, block_squares.data());
                 for (std::int64_t c = 0; c < width; ++c)
                   join_columns(static_cast<double>(r - begin), static_cast<double>(count),
                                static_cast<double>(block_mean[static_cast<std::size_t>(c)]),
                                static_cast<double>(block_squares[static_cast<std::size_t>(c)]), means[c], spread[c]);
               });
             });
  for (std::int64_t c = 0; c < columns; ++c) {
    double middle = parts_[static_cast<std::size_t>(c)], sum = parts_[static_cast<std::size_t>(columns + c)];
    for (std::int64_t chunk = 1; chunk < chunks; ++chunk) {
      const double* const part = parts_.data() + 2 * chunk * columns + c;
      const std::int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
      join_columns(static_cast<double>(begin), static_cast<double>(end - begin), part[0], part[columns], middle, sum);
    }
    mean[c] = static_cast<float>(middle);
    squares[c] = static_cast<float>(sum);
  }
}

template <class T>
void ColumnSums::products(const T* x, const T* y, Epilogue activation, T* dy, const float* mean, std::int64_t rows,
                          std::int64_t columns, float* products, float* sums) {
  const std::int64_t chunks = chunks_of(rows, columns);
  parts_.resize(static_cast<std::size_t>(2 * chunks * columns));
  for_pieces(rows, columns,
             [&](std::int64_t chunk, std::int64_t begin, std::int64_t end, std::int64_t first, std::int64_t width) {
               WideTile wide_products{}, wide_sums{};
               for_blocks(begin, end, width, [&](std::int64_t r, std::int64_t count) {
                 Tile of_block, sum_of_block;
                 std::fill_n(of_block.begin(), width, 0.0f);
                 std::fill_n(sum_of_block.begin(), width, 0.0f);
                 const std::int64_t at = r * columns + first;
                 if (y != nullptr)
                   add_masked_products_of_block(x + at, y + at, dy + at, mean + first, top_of(activation), count,
                                                columns, width, of_block.data(), sum_of_block.data());
                 else
                   add_products_of_block(x + at, dy + at, mean + first, count, columns, width, of_block.data(),
                                         sum_of_block.data());
                 for (std::size_t c = 0; c < static_cast<std::size_t>(width); ++c) {
                   wide_products[c] += static_cast<double>(of_block[c]);
                   wide_sums[c] += static_cast<double>(sum_of_block[c]);
                 }
               });
               double* const to = parts_.data() + 2 * chunk * columns + first;
               std::copy_n(wide_products.begin(), width, to);
               std::copy_n(wide_sums.begin(), width, to + columns);
             });
  for (std::int64_t c = 0; c < columns; ++c) {
    double product = 0.0, sum = 0.0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      product += parts_[static_cast<std::size_t>(2 * chunk * columns + c)];
      sum += parts_[static_cast<std::size_t>((2 * chunk + 1) * columns + c)];
    }
    products[c] = static_cast<float>(product);
    sums[c] = static_cast<float>(sum);
  }
}

template <class T>
void normalise_columns(const T* x, const T* residual, const float* mean, const float* scale, const float* shift,
                       Epilogue activation, std::int64_t rows, std::int64_t columns, T* y) {
  LOCKSTEP_ASSERT(residual == nullptr || activation == Epilogue::kRelu);
  parallel_for(rows, std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, columns)),
               [&](std::int64_t begin, std::int64_t end) {
                 const std::int64_t at = begin * columns, count = end - begin;
                 if (residual != nullptr)
                   normalise_rows_add_relu(x + at, residual + at, mean, scale, shift, count, columns, y + at);
                 else if (activation != Epilogue::kNone)
                   normalise_rows_relu(x + at, mean, scale, shift, top_of(activation), count, columns, y + at);
                 else
                   normalise_rows(x + at, mean, scale, shift, count, columns, y + at);
               });
}

template <class T>
void grad_input_columns(const T* x, const T* dy, const float* mean, const float* scale, const float* offset,
                        const float* slope, std::int64_t rows, std::int64_t columns, T* dx) {
  parallel_for(rows, std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, columns)),
               [&](std::int64_t begin, std::int64_t end) {
                 const std::int64_t at = begin * columns;
                 grad_input_rows(x + at, dy + at, mean, scale, offset, slope, end - begin, columns, dx + at);
               });
}

#define LOCKSTEP_COLUMNS_OF(T)                                                                                   \
  template void ColumnSums::moments(const T*, std::int64_t, std::int64_t, float*, float*);                       \
  template void ColumnSums::products(const T*, const T*, Epilogue, T*, const float*, std::int64_t, std::int64_t, \
                                     float*, float*);                                                            \
  template void sum_rows(const T*, std::int64_t, std::int64_t, bool, float*);                                    \
  template void normalise_columns(const T*, const T*, const float*, const float*, const float*, Epilogue,        \
                                  std::int64_t, std::int64_t, T*);                                               \
  template void grad_input_columns(const T*, const T*, const float*, const float*, const float*, const float*,   \
                                   std::int64_t, std::int64_t, T*);
LOCKSTEP_COLUMNS_OF(float)
LOCKSTEP_COLUMNS_OF(BFloat16)
#undef LOCKSTEP_COLUMNS_OF

}  // namespace lockstep::nn::cpu
