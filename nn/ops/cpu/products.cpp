#include "nn/ops/cpu/products.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/transpose.h"

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

/// One factor of a product, seen as `count` vectors of the product's depth. In rows, (count, depth), or in columns,
/// (depth, count); `stride` from one row of that to the next.
struct Factor {
  const float* data;
  std::int64_t stride;
  bool in_columns;

  /// From vector i and depth k on.
  Factor from(std::int64_t i, std::int64_t k) const {
    return {data + (in_columns ? k * stride + i : i * stride + k), stride, in_columns};
  }
};

/// What a product is added to: rows at a stride; none where data is nullptr.
struct Start {
  const float* data = nullptr;
  std::int64_t stride = 0;

  Start from(std::int64_t i, std::int64_t j) const {
    return {data == nullptr ? nullptr : data + i * stride + j, stride};
  }
};

// c (kRows, kTileColumns) = start + the product of some rows of a and one strip of b. a: a strip, or rows in memory.
template <int kRows, bool kStrip>
LOCKSTEP_AVX2 [[gnu::always_inline]] inline void tile(const float* a, std::int64_t a_stride, const float* b,
                                                      std::int64_t depth, const Start& start, float* c,
                                                      std::int64_t c_stride) {
  Vector sums[kRows][kVectors] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __builtin_prefetch(c + r * c_stride, 1);
    __builtin_prefetch(c + r * c_stride + kTileColumns - 1, 1);
  }
  for (std::int64_t k = 0; k < depth; ++k, b += kTileColumns) {
    __builtin_prefetch(b + kAhead);
    Vector w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) std::memcpy(&w[v], b + v * kLanes, sizeof(Vector));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float x = kStrip ? a[k * kTileRows + r] : a[r * a_stride + k];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vector sum = sums[r][v];
      if (start.data != nullptr) {
        Vector old;
        std::memcpy(&old, start.data + r * start.stride + v * kLanes, sizeof old);
        sum += old;
      }
      std::memcpy(c + r * c_stride + v * kLanes, &sum, sizeof sum);
    }
}

template <int kRows, bool kStrip>
LOCKSTEP_AVX2 [[gnu::always_inline]] inline void tile_of(std::int64_t rows, const float* a, std::int64_t a_stride,
                                                         const float* b, std::int64_t depth, const Start& start,
                                                         float* c, std::int64_t c_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kRows - 1, kStrip>(rows, a, a_stride, b, depth, start, c, c_stride);
  }
  tile<kRows, kStrip>(a, a_stride, b, depth, start, c, c_stride);
}

// `count` vectors of x side by side in strips: (count / kWidth, depth, kWidth), zero where there are fewer.
template <std::int64_t kWidth>
LOCKSTEP_AVX2 void pack(const Factor& x, std::int64_t count, std::int64_t depth, float* to) {
  for (std::int64_t first = 0; first < count; first += kWidth, to += kWidth * depth) {
    const std::int64_t width = std::min(kWidth, count - first);
    const float* const from = x.from(first, 0).data;
    if (width < kWidth) std::memset(to, 0, static_cast<std::size_t>(kWidth * depth) * sizeof(float));
    if (!x.in_columns) {
      transpose(from, x.stride, width, depth, to, kWidth);
    } else if (width == kWidth) {
      for (std::int64_t k = 0; k < depth; ++k)
        std::memcpy(to + k * kWidth, from + k * x.stride, kWidth * sizeof(float));
    } else {
      for (std::int64_t k = 0; k < depth; ++k)
        for (std::int64_t i = 0; i < width; ++i) to[k * kWidth + i] = from[k * x.stride + i];
    }
  }
}

// A block of c from a, strips or rows in memory, and strips of b.
template <bool kStrips>
LOCKSTEP_AVX2 void block(const float* a, std::int64_t a_stride, const float* b, std::int64_t depth, std::int64_t rows,
                         std::int64_t columns, const Start& start, float* c, std::int64_t c_stride) {
  for (std::int64_t j = 0; j < columns; j += kTileColumns)
    for (std::int64_t i = 0; i < rows; i += kTileRows) {
      const std::int64_t height = std::min(kTileRows, rows - i), width = std::min(kTileColumns, columns - j);
      const float* const some = a + i * (kStrips ? depth : a_stride);
      const Start from = start.from(i, j);
      float* const to = c + i * c_stride + j;
      if (width == kTileColumns) {
        tile_of<kTileRows, kStrips>(height, some, a_stride, b + j * depth, depth, from, to, c_stride);
        continue;
      }
      float whole[kTileRows * kTileColumns];
      tile_of<kTileRows, kStrips>(height, some, a_stride, b + j * depth, depth, {}, whole, kTileColumns);
      for (std::int64_t r = 0; r < height; ++r)
        for (std::int64_t v = 0; v < width; ++v) {
          const float sum = whole[r * kTileColumns + v];
          to[r * c_stride + v] = from.data != nullptr ? sum + from.data[r * from.stride + v] : sum;
        }
    }
}

constexpr std::int64_t up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

std::int64_t scratch_of_b(std::int64_t depth, std::int64_t n) {
  return std::min(depth, kBlockDepth) * up(std::min(n, kBlockColumns), kTileColumns);
}

// A part of c, (m, n), whose rows are c_stride long.
void multiply_part(const Factor& a, const Factor& b, std::int64_t depth, std::int64_t m, std::int64_t n,
                   const Start& start, float* c, std::int64_t c_stride, float* scratch) {
  float* const packed_b = scratch;
  float* const packed_a = scratch + scratch_of_b(depth, n);
  for (std::int64_t j = 0; j < n; j += kBlockColumns)
    for (std::int64_t k = 0; k < depth; k += kBlockDepth) {
      const std::int64_t columns = std::min(kBlockColumns, n - j), some = std::min(kBlockDepth, depth - k);
      pack<kTileColumns>(b.from(j, k), columns, some, packed_b);
      for (std::int64_t i = 0; i < m; i += kBlockRows) {
        const std::int64_t rows = std::min(kBlockRows, m - i);
        float* const to = c + i * c_stride + j;
        const Start from = k > 0 ? Start{to, c_stride} : start.from(i, j);
        if (a.in_columns) {
          pack<kTileRows>(a.from(i, k), rows, some, packed_a);
          block<true>(packed_a, 0, packed_b, some, rows, columns, from, to, c_stride);
        } else {
          // Rows are read where they are: a tile's six streams are as good as one.
          block<false>(a.from(i, k).data, a.stride, packed_b, some, rows, columns, from, to, c_stride);
        }
      }
    }
}

// c (m, n), without gaps. Threads share the longer side of c, and each packs all of the other one.
void multiply(const Factor& a, const Factor& b, std::int64_t depth, std::int64_t m, std::int64_t n, const Start& start,
              float* c, CachingAllocator& allocator) {
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
        multiply_part(a.from(begin, 0), b, depth, count, n, start.from(begin, 0), c + begin * n, n, mine);
      else
        multiply_part(a, b.from(begin, 0), depth, m, count, start.from(0, begin), c + begin, n, mine);
    }
  });
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
  multiply_part({a, m, true}, {b, n, true}, depth, m, n, accumulate ? Start{c, n} : Start{}, c, n, scratch);
}

void multiply_columns(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                      bool accumulate, float* c, CachingAllocator& allocator) {
  multiply({a, m, true}, {b, n, true}, depth, m, n, accumulate ? Start{c, n} : Start{}, c, allocator);
}

void multiply_rows(const float* a, const float* b, bool b_in_columns, const float* bias, std::int64_t depth,
                   std::int64_t m, std::int64_t n, float* c, CachingAllocator& allocator) {
  multiply({a, depth, false}, {b, b_in_columns ? n : depth, b_in_columns}, depth, m, n, Start{bias, 0}, c, allocator);
}

}  // namespace lockstep::nn::cpu
