#include "nn/ops/cpu/products.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

// As Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), do it: a tile of c stays in
// registers while a block of depth goes by. What it reads of b, kTileColumns wide, stays in the first cache for all
// tiles of kBlockRows, whose part of a stays in the second; kBlockColumns of b stay in the last one.
constexpr std::int64_t kTileRows = 6, kTileColumns = 16;  // with AVX2, twelve of sixteen registers
constexpr std::int64_t kBlockDepth = 256, kBlockRows = 24 * kTileRows, kBlockColumns = 64 * kTileColumns;
constexpr std::int64_t kAhead = 16 * kTileColumns;  // of b, which comes from the second cache or the third

using Vector = float __attribute__((vector_size(32)));
constexpr std::int64_t kLanes = sizeof(Vector) / sizeof(float);
constexpr int kVectors = kTileColumns / kLanes;

#if defined(__x86_64__)
#define LOCKSTEP_AVX2 [[gnu::target("arch=x86-64-v3")]]
#else
#define LOCKSTEP_AVX2
#endif

// c (kRows, kTileColumns) = or += the product of one strip of a and one of b.
template <int kRows>
LOCKSTEP_AVX2 [[gnu::always_inline]] inline void tile(const float* a, const float* b, std::int64_t depth, bool add,
                                                      float* c, std::int64_t c_stride) {
  Vector sums[kRows][kVectors] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __builtin_prefetch(c + r * c_stride, 1);
    __builtin_prefetch(c + r * c_stride + kTileColumns - 1, 1);
  }
  for (std::int64_t k = 0; k < depth; ++k, a += kTileRows, b += kTileColumns) {
    __builtin_prefetch(b + kAhead);
    Vector w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) std::memcpy(&w[v], b + v * kLanes, sizeof(Vector));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float x = a[r];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* const to = c + r * c_stride + v * kLanes;
      Vector old = {};
      if (add) std::memcpy(&old, to, sizeof old);
      const Vector sum = add ? sums[r][v] + old : sums[r][v];
      std::memcpy(to, &sum, sizeof sum);
    }
}

template <int kRows>
LOCKSTEP_AVX2 [[gnu::always_inline]] inline void tile_of(std::int64_t rows, const float* a, const float* b,
                                                         std::int64_t depth, bool add, float* c,
                                                         std::int64_t c_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kRows - 1>(rows, a, b, depth, add, c, c_stride);
  }
  tile<kRows>(a, b, depth, add, c, c_stride);
}

// Columns of x side by side in strips: (columns / kWidth, depth, kWidth), zero where x has fewer.
template <std::int64_t kWidth>
LOCKSTEP_AVX2 void pack(const float* x, std::int64_t stride, std::int64_t columns, std::int64_t depth, float* to) {
  for (std::int64_t first = 0; first < columns; first += kWidth, to += kWidth * depth) {
    const std::int64_t width = std::min(kWidth, columns - first);
    if (width == kWidth) {
      for (std::int64_t k = 0; k < depth; ++k)
        std::memcpy(to + k * kWidth, x + k * stride + first, kWidth * sizeof(float));
      continue;
    }
    std::memset(to, 0, static_cast<std::size_t>(kWidth * depth) * sizeof(float));
    for (std::int64_t k = 0; k < depth; ++k)
      for (std::int64_t i = 0; i < width; ++i) to[k * kWidth + i] = x[k * stride + first + i];
  }
}

// A block of c from strips of a and b.
LOCKSTEP_AVX2 void block(const float* a, const float* b, std::int64_t depth, std::int64_t rows, std::int64_t columns,
                         bool add, float* c, std::int64_t c_stride) {
  for (std::int64_t j = 0; j < columns; j += kTileColumns)
    for (std::int64_t i = 0; i < rows; i += kTileRows) {
      const std::int64_t height = std::min(kTileRows, rows - i), width = std::min(kTileColumns, columns - j);
      float* const to = c + i * c_stride + j;
      if (width == kTileColumns) {
        tile_of<kTileRows>(height, a + i * depth, b + j * depth, depth, add, to, c_stride);
        continue;
      }
      float whole[kTileRows * kTileColumns];
      tile_of<kTileRows>(height, a + i * depth, b + j * depth, depth, false, whole, kTileColumns);
      for (std::int64_t r = 0; r < height; ++r)
        for (std::int64_t v = 0; v < width; ++v) {
          const float sum = whole[r * kTileColumns + v];
          to[r * c_stride + v] = add ? sum + to[r * c_stride + v] : sum;
        }
    }
}

constexpr std::int64_t up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

std::int64_t scratch_of_b(std::int64_t depth, std::int64_t n) {
  return std::min(depth, kBlockDepth) * up(std::min(n, kBlockColumns), kTileColumns);
}

// A part of c, (m, n), whose rows are c_stride long; likewise a and b.
void multiply_part(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, std::int64_t depth,
                   std::int64_t m, std::int64_t n, bool accumulate, float* c, std::int64_t c_stride, float* scratch) {
  float* const packed_b = scratch;
  float* const packed_a = scratch + scratch_of_b(depth, n);
  for (std::int64_t j = 0; j < n; j += kBlockColumns)
    for (std::int64_t k = 0; k < depth; k += kBlockDepth) {
      const std::int64_t columns = std::min(kBlockColumns, n - j), some = std::min(kBlockDepth, depth - k);
      pack<kTileColumns>(b + k * b_stride + j, b_stride, columns, some, packed_b);
      for (std::int64_t i = 0; i < m; i += kBlockRows) {
        const std::int64_t rows = std::min(kBlockRows, m - i);
        pack<kTileRows>(a + k * a_stride + i, a_stride, rows, some, packed_a);
        block(packed_a, packed_b, some, rows, columns, accumulate || k > 0, c + i * c_stride + j, c_stride);
      }
    }
}

}  // namespace

bool computes_with_avx2() {
#if defined(__x86_64__)
  static const bool does = cpu_features().avx2 && cpu_features().fma && cpu_kernel_isa().starts_with("avx2");
  return does;
#else
  return false;
#endif
}

std::int64_t column_scratch(std::int64_t depth, std::int64_t m, std::int64_t n) {
  return up(scratch_of_b(depth, n) + std::min(depth, kBlockDepth) * up(std::min(m, kBlockRows), kTileRows),
            kTileColumns);
}

void multiply_columns_alone(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                            bool accumulate, float* c, float* scratch) {
  multiply_part(a, m, b, n, depth, m, n, accumulate, c, n, scratch);
}

void multiply_columns(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                      bool accumulate, float* c, CachingAllocator& allocator) {
  // Threads share the longer side of c, and each packs all of the other one.
  const bool by_rows = m >= n;
  const std::int64_t side = by_rows ? m : n, step = by_rows ? kTileRows : kTileColumns;
  const std::int64_t tiles = up(side, step) / step, parts = std::min<std::int64_t>(omp_get_max_threads(), tiles);
  const Tensor scratch = Tensor::empty(allocator, {parts, column_scratch(depth, m, n)});
  parallel_for(parts, 1, [&](std::int64_t first_part, std::int64_t end_part) {
    for (std::int64_t part = first_part; part < end_part; ++part) {
      const std::int64_t begin = tiles * part / parts * step;
      const std::int64_t count = std::min(tiles * (part + 1) / parts * step, side) - begin;
      float* const mine = scratch.f32() + part * scratch.size(1);
      if (by_rows)
        multiply_part(a + begin, m, b, n, depth, count, n, accumulate, c + begin * n, n, mine);
      else
        multiply_part(a, m, b + begin, n, depth, m, count, accumulate, c + begin, n, mine);
    }
  });
}

}  // namespace lockstep::nn::cpu
