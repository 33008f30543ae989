#include "nn/ops/cpu/products.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/transpose.h"

namespace lockstep::nn::cpu {
namespace {

// Of a panel that is read again for the next rows: 32 KiB.
constexpr std::int64_t kDepthBlock = 256;
// Panels of a recurrence come from the second cache at each step, faster if they are asked for in time: elements.
constexpr std::int64_t kAhead = 16 * kPanel;

// Note [Tiles]
// A tile of c stays in registers while `depth` goes by: kRows rows of kVectors vectors, chosen so that they, a row of
// the panel and one number of a fill the registers that an instruction set has. With fewer rows the additions of one
// sum wait for each other, but then reading the panel takes the time.

template <class Vector>
constexpr std::int64_t kLanes = sizeof(Vector) / sizeof(float);

template <class Vector, int kRows, int kVectors>
[[gnu::always_inline]] inline void tile(const float* a, std::int64_t a_stride, std::int64_t depth, const float* panel,
                                        float* c, std::int64_t c_stride) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(&sums[r][v], c + r * c_stride + v * kLanes<Vector>, sizeof(Vector));
  for (std::int64_t k = 0; k < depth; ++k, panel += kPanel) {
    __builtin_prefetch(panel + kAhead);
    __builtin_prefetch(panel + kAhead + kPanel / 2);
    Vector w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(&w[v], panel + v * kLanes<Vector>, sizeof(Vector));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float x = a[r * a_stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(c + r * c_stride + v * kLanes<Vector>, &sums[r][v], sizeof(Vector));
}

// Up to kRows rows, all columns of the panel.
template <class Vector, int kRows, int kVectors>
[[gnu::always_inline]] inline void some_rows(const float* a, std::int64_t a_stride, std::int64_t rows,
                                             std::int64_t depth, const float* panel, float* c, std::int64_t c_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return some_rows<Vector, kRows - 1, kVectors>(a, a_stride, rows, depth, panel, c, c_stride);
  }
  for (std::int64_t v = 0; v < kPanel; v += kVectors * kLanes<Vector>)
    tile<Vector, kRows, kVectors>(a, a_stride, depth, panel + v, c + v, c_stride);
}

template <class Vector, int kRows, int kVectors>
[[gnu::always_inline]] inline void product(const float* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth,
                                           const float* panel, std::int64_t width, float* c, std::int64_t c_stride) {
  for (std::int64_t k = 0; k < depth; k += kDepthBlock) {
    const std::int64_t deep = depth - k < kDepthBlock ? depth - k : kDepthBlock;
    for (std::int64_t r = 0; r < rows; r += kRows) {
      const std::int64_t count = rows - r < kRows ? rows - r : kRows;
      float* const to = c + r * c_stride;
      if (width == kPanel) {
        some_rows<Vector, kRows, kVectors>(a + r * a_stride + k, a_stride, count, deep, panel + k * kPanel, to,
                                           c_stride);
        continue;
      }
      float padded[kRows * kPanel] = {};
      const auto bytes = static_cast<std::size_t>(width) * sizeof(float);
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(padded + i * kPanel, to + i * c_stride, bytes);
      some_rows<Vector, kRows, kVectors>(a + r * a_stride + k, a_stride, count, deep, panel + k * kPanel, padded,
                                         kPanel);
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * c_stride, padded + i * kPanel, bytes);
    }
  }
}

#if defined(__x86_64__)
constexpr int kPairRows = 8;  // with two vectors of sums each, as in Note [Tiles]
constexpr std::int64_t kFloats = 16;

// Adds what kDepth elements of each row, one or two, contribute.
template <int kRows, int kDepth>
[[LOCKSTEP_AVX512_BF16, gnu::always_inline]] inline void add_pairs(const BFloat16* a, std::int64_t a_stride,
                                                                   const BFloat16* panel, __m512 (&low)[kRows],
                                                                   __m512 (&high)[kRows]) {
  const auto w_low = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(panel));
  const auto w_high = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(panel + 2 * kFloats));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    std::int32_t pair = 0;
    std::memcpy(&pair, a + r * a_stride, kDepth * sizeof(BFloat16));
    const auto x = __builtin_bit_cast(__m512bh, _mm512_set1_epi32(pair));
    low[r] = _mm512_dpbf16_ps(low[r], w_low, x);
    high[r] = _mm512_dpbf16_ps(high[r], w_high, x);
  }
}

template <int kRows>
[[LOCKSTEP_AVX512_BF16, gnu::always_inline]] inline void tile_in_pairs(const BFloat16* a, std::int64_t a_stride,
                                                                       std::int64_t depth, const BFloat16* panel,
                                                                       float* c, std::int64_t c_stride) {
  __m512 low[kRows], high[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    low[r] = _mm512_loadu_ps(c + r * c_stride);
    high[r] = _mm512_loadu_ps(c + r * c_stride + kFloats);
  }
  std::int64_t k = 0;
  for (; k + 2 <= depth; k += 2, panel += 2 * kPanel) {
    _mm_prefetch(panel + 2 * kAhead, _MM_HINT_T0);
    _mm_prefetch(panel + 2 * kAhead + kPanel, _MM_HINT_T0);
    add_pairs<kRows, 2>(a + k, a_stride, panel, low, high);
  }
  if (k < depth) add_pairs<kRows, 1>(a + k, a_stride, panel, low, high);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(c + r * c_stride, low[r]);
    _mm512_storeu_ps(c + r * c_stride + kFloats, high[r]);
  }
}

template <int kRows>
[[LOCKSTEP_AVX512_BF16, gnu::always_inline]] inline void some_rows_in_pairs(const BFloat16* a, std::int64_t a_stride,
                                                                            std::int64_t rows, std::int64_t depth,
                                                                            const BFloat16* panel, float* c,
                                                                            std::int64_t c_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return some_rows_in_pairs<kRows - 1>(a, a_stride, rows, depth, panel, c, c_stride);
  }
  tile_in_pairs<kRows>(a, a_stride, depth, panel, c, c_stride);
}

[[LOCKSTEP_AVX512_BF16]] void product_in_pairs(const BFloat16* a, std::int64_t a_stride, std::int64_t rows,
                                               std::int64_t depth, const BFloat16* panel, std::int64_t width, float* c,
                                               std::int64_t c_stride) {
  constexpr std::int64_t kDeep = 2 * kDepthBlock;  // as many bytes
  for (std::int64_t k = 0; k < depth; k += kDeep) {
    const std::int64_t deep = depth - k < kDeep ? depth - k : kDeep;
    for (std::int64_t r = 0; r < rows; r += kPairRows) {
      const std::int64_t count = rows - r < kPairRows ? rows - r : kPairRows;
      const BFloat16* const from = a + r * a_stride + k;
      float* const to = c + r * c_stride;
      if (width == kPanel) {
        some_rows_in_pairs<kPairRows>(from, a_stride, count, deep, panel + k * kPanel, to, c_stride);
        continue;
      }
      float padded[kPairRows * kPanel] = {};
      const auto bytes = static_cast<std::size_t>(width) * sizeof(float);
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(padded + i * kPanel, to + i * c_stride, bytes);
      some_rows_in_pairs<kPairRows>(from, a_stride, count, deep, panel + k * kPanel, padded, kPanel);
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * c_stride, padded + i * kPanel, bytes);
    }
  }
}
#endif

using Product = void (*)(const float*, std::int64_t, std::int64_t, std::int64_t, const float*, std::int64_t, float*,
                         std::int64_t);

using Four = float __attribute__((vector_size(16)));
void product_plain(const float* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth, const float* panel,
                   std::int64_t width, float* c, std::int64_t c_stride) {
  product<Four, 6, 2>(a, a_stride, rows, depth, panel, width, c, c_stride);
}

#if defined(__x86_64__)
using Eight = float __attribute__((vector_size(32)));
[[gnu::target("arch=x86-64-v3")]] void product_avx2(const float* a, std::int64_t a_stride, std::int64_t rows,
                                                    std::int64_t depth, const float* panel, std::int64_t width,
                                                    float* c, std::int64_t c_stride) {
  product<Eight, 6, 2>(a, a_stride, rows, depth, panel, width, c, c_stride);
}

using Sixteen = float __attribute__((vector_size(64)));
[[gnu::target("arch=x86-64-v4")]] void product_avx512(const float* a, std::int64_t a_stride, std::int64_t rows,
                                                      std::int64_t depth, const float* panel, std::int64_t width,
                                                      float* c, std::int64_t c_stride) {
  product<Sixteen, 8, 2>(a, a_stride, rows, depth, panel, width, c, c_stride);
}

Product best_product() {
  const CpuFeatures features = cpu_features();
  return features.avx512 ? product_avx512 : features.avx2 && features.fma ? product_avx2 : product_plain;
}
#else
Product best_product() { return product_plain; }
#endif

}  // namespace

void pack_rows(const float* w, std::int64_t stride, std::int64_t width, std::int64_t depth, float* panel) {
  if (width < kPanel) std::fill(panel, panel + depth * kPanel, 0.0f);
  // A strip of columns at a time: what it reads of all rows and what it writes stay in the first cache.
  constexpr std::int64_t kStrip = 64;
  for (std::int64_t k = 0; k < depth; k += kStrip)
    transpose(w + k, stride, width, std::min(kStrip, depth - k), panel + k * kPanel, kPanel);
}

void pack_columns(const float* w, std::int64_t stride, std::int64_t width, std::int64_t depth, float* panel) {
  if (width < kPanel) std::fill(panel, panel + depth * kPanel, 0.0f);
  for (std::int64_t k = 0; k < depth; ++k)
    std::memcpy(panel + k * kPanel, w + k * stride, static_cast<std::size_t>(width) * sizeof(float));
}

void pack_rows(const BFloat16* w, std::int64_t stride, std::int64_t width, std::int64_t depth, BFloat16* panel) {
  if (width < kPanel || depth % 2 != 0) std::fill_n(panel, panel_size<BFloat16>(depth), BFloat16());
  // A strip at a time, as above.
  constexpr std::int64_t kStrip = 64;
  for (std::int64_t first = 0; first < depth; first += kStrip) {
    const std::int64_t end = std::min(depth, first + kStrip);
    for (std::int64_t c = 0; c < width; ++c) {
      const BFloat16* const from = w + c * stride;
      BFloat16* const to = panel + 2 * c;
      std::int64_t k = first;
      for (; k + 2 <= end; k += 2) std::memcpy(to + k * kPanel, from + k, 2 * sizeof(BFloat16));
      if (k < end) to[k * kPanel] = from[k];
    }
  }
}

void pack_columns(const BFloat16* w, std::int64_t stride, std::int64_t width, std::int64_t depth, BFloat16* panel) {
  if (width < kPanel || depth % 2 != 0) std::fill_n(panel, panel_size<BFloat16>(depth), BFloat16());
  for (std::int64_t k = 0; k < depth; ++k) {
    const BFloat16* const from = w + k * stride;
    BFloat16* const to = panel + k / 2 * 2 * kPanel + k % 2;
    for (std::int64_t c = 0; c < width; ++c) to[2 * c] = from[c];
  }
}

void add_product(const float* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth, const float* panel,
                 std::int64_t width, float* c, std::int64_t c_stride) {
  static const Product best = best_product();
  best(a, a_stride, rows, depth, panel, width, c, c_stride);
}

void add_product([[maybe_unused]] const BFloat16* a, [[maybe_unused]] std::int64_t a_stride,
                 [[maybe_unused]] std::int64_t rows, [[maybe_unused]] std::int64_t depth,
                 [[maybe_unused]] const BFloat16* panel, [[maybe_unused]] std::int64_t width, [[maybe_unused]] float* c,
                 [[maybe_unused]] std::int64_t c_stride) {
#if defined(__x86_64__)
  product_in_pairs(a, a_stride, rows, depth, panel, width, c, c_stride);
#else
  LOCKSTEP_ASSERT(false, "pairs of bf16 on this processor");
#endif
}

}  // namespace lockstep::nn::cpu
