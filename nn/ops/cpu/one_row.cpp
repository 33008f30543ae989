#include "nn/ops/cpu/products.h"

#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kLanes = 16;
// Rows of w side by side: their sums do not wait for each other.
constexpr int kRows = 4;
// Of memory: rows are too short for the processor to fetch the next ones in time, so those are asked for one by one.
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kGrain = 16384;  // elements of w that are worth a thread

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using Halves = std::uint16_t __attribute__((vector_size(kLanes * sizeof(std::uint16_t))));
using Words = std::uint32_t __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));

[[gnu::always_inline]] inline void load(Lanes& to, const float* from) { std::memcpy(&to, from, sizeof to); }
[[gnu::always_inline]] inline void load(Lanes& to, const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  std::memcpy(&to, &words, sizeof to);
}

// Rows [begin, end) of w. Locals alone are vectors: nothing of them crosses a call.
template <class X, class Y>
LOCKSTEP_SIMD_CLONES void multiply_rows(const X* x, const X* w, const Y* b, std::int64_t in, std::int64_t begin,
                                        std::int64_t end, Y* y) {
  const std::int64_t whole = in / kLanes * kLanes;
  for (std::int64_t first = begin; first < end; first += kRows) {
    const int rows = static_cast<int>(end - first < kRows ? end - first : kRows);
    Lanes sums[kRows] = {};
    const X* const from = w + first * in;
    if (rows == kRows) {
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        Lanes xs, ws;
        load(xs, x + i);
        for (int r = 0; r < kRows; ++r) {
          load(ws, from + r * in + i);
          sums[r] += xs * ws;
        }
      }
    } else {
      for (int r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < whole; i += kLanes) {
          Lanes xs, ws;
          load(xs, x + i);
          load(ws, from + r * in + i);
          sums[r] += xs * ws;
        }
    }
    for (int r = 0; r < rows; ++r) {
      float lane[kLanes];
      std::memcpy(lane, &sums[r], sizeof lane);
      for (std::int64_t i = whole, l = 0; i < in; ++i, ++l) lane[l] += wide(x[i]) * wide(from[r * in + i]);
      for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
        for (std::int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
      y[first + r] = narrow<Y>(lane[0] + (b != nullptr ? wide(b[first + r]) : 0.0f));
    }
  }
}

#if defined(__x86_64__)
[[LOCKSTEP_AVX512_BF16, gnu::always_inline]] inline __m512bh pairs(const BFloat16* from) {
  return __builtin_bit_cast(__m512bh, _mm512_loadu_si512(from));
}
[[LOCKSTEP_AVX512_BF16, gnu::always_inline]] inline __m512bh pairs(const BFloat16* from, __mmask32 those) {
  return __builtin_bit_cast(__m512bh, _mm512_maskz_loadu_epi16(those, from));
}

template <class Y>
[[LOCKSTEP_AVX512_BF16]] void multiply_rows_in_pairs(const BFloat16* x, const BFloat16* w, const Y* b, std::int64_t in,
                                                     std::int64_t begin, std::int64_t end, Y* y) {
  constexpr std::int64_t kPairs = 32;  // elements of a vector
  const std::int64_t whole = in / kPairs * kPairs;
  const auto rest = static_cast<__mmask32>((std::uint64_t{1} << (in - whole)) - 1);
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t rows = end - first < kRows ? end - first : kRows;
    // Of fewer rows the last one is taken several times.
    const BFloat16* from[kRows] = {};
    __m512 sums[kRows] = {};
    for (std::int64_t r = 0; r < kRows; ++r) {
      from[r] = w + (first + (r < rows ? r : rows - 1)) * in;
    }
    for (std::int64_t i = 0; i < whole; i += kPairs) {
      const __m512bh xs = pairs(x + i);
      for (int r = 0; r < kRows; ++r) _mm_prefetch(from[r] + kRows * in + i, _MM_HINT_T0);
      for (int r = 0; r < kRows; ++r) sums[r] = _mm512_dpbf16_ps(sums[r], xs, pairs(from[r] + i));
    }
    if (whole < in) {
      const __m512bh xs = pairs(x + whole, rest);
      for (int r = 0; r < kRows; ++r) sums[r] = _mm512_dpbf16_ps(sums[r], xs, pairs(from[r] + whole, rest));
    }
    for (std::int64_t r = 0; r < rows; ++r)
      y[first + r] = narrow<Y>(_mm512_reduce_add_ps(sums[r]) + (b != nullptr ? wide(b[first + r]) : 0.0f));
  }
}

[[gnu::target("arch=x86-64-v4")]] void multiply_int8_rows_avx512(const float* x, const std::int8_t* w,
                                                                 const float* scales, const float* b, std::int64_t in,
                                                                 std::int64_t begin, std::int64_t end, float* y) {
  const std::int64_t whole = in / kLanes * kLanes;
  const auto rest = static_cast<__mmask16>((1u << (in - whole)) - 1u);
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t rows = end - first < kRows ? end - first : kRows;
    const std::int8_t* from[kRows] = {};
    __m512 sums[kRows] = {};
    for (std::int64_t r = 0; r < kRows; ++r) {
      from[r] = w + (first + (r < rows ? r : rows - 1)) * in;
    }
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      const __m512 xs = _mm512_loadu_ps(x + i);
      if (i % kLine == 0)
        for (int r = 0; r < kRows; ++r) _mm_prefetch(from[r] + kRows * in + i, _MM_HINT_T0);
      for (int r = 0; r < kRows; ++r) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[r] + i));
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), xs, sums[r]);
      }
    }
    if (whole < in) {
      const __m512 xs = _mm512_maskz_loadu_ps(rest, x + whole);
      for (int r = 0; r < kRows; ++r) {
        const __m128i bytes = _mm_maskz_loadu_epi8(rest, from[r] + whole);
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), xs, sums[r]);
      }
    }
    for (std::int64_t r = 0; r < rows; ++r)
      y[first + r] = _mm512_reduce_add_ps(sums[r]) * scales[first + r] + (b != nullptr ? b[first + r] : 0.0f);
  }
}
#endif

LOCKSTEP_SIMD_CLONES
void multiply_int8_rows(const float* x, const std::int8_t* w, const float* scales, const float* b, std::int64_t in,
                        std::int64_t begin, std::int64_t end, float* y) {
  for (std::int64_t o = begin; o < end; ++o) {
    const std::int8_t* const from = w + o * in;
    const float sum = lane_sum(in, [&](std::int64_t i) { return x[i] * static_cast<float>(from[i]); });
    y[o] = sum * scales[o] + (b != nullptr ? b[o] : 0.0f);
  }
}

template <class X, class Y>
auto best_rows() {
#if defined(__x86_64__)
  if constexpr (sizeof(X) < sizeof(float))
    if (multiplies_pairs()) return multiply_rows_in_pairs<Y>;
#endif
  return multiply_rows<X, Y>;
}

auto best_int8_rows() {
#if defined(__x86_64__)
  if (cpu_features().avx512) return multiply_int8_rows_avx512;
#endif
  return multiply_int8_rows;
}

}  // namespace

template <class X, class Y>
void multiply_row(const X* x, const X* w, const Y* b, std::int64_t in, std::int64_t out, Y* y) {
  static const auto best = best_rows<X, Y>();
  const std::int64_t blocks = (out + kRows - 1) / kRows;
  parallel_for(blocks, kGrain / (kRows * (in > 0 ? in : 1)), [&](std::int64_t begin, std::int64_t end) {
    best(x, w, b, in, begin * kRows, std::min(end * kRows, out), y);
  });
}

void multiply_int8_row(const float* x, const std::int8_t* w, const float* scales, const float* b, std::int64_t in,
                       std::int64_t out, float* y) {
  static const auto best = best_int8_rows();
  const std::int64_t blocks = (out + kRows - 1) / kRows;
  parallel_for(blocks, kGrain / (kRows * (in > 0 ? in : 1)), [&](std::int64_t begin, std::int64_t end) {
    best(x, w, scales, b, in, begin * kRows, std::min(end * kRows, out), y);
  });
}

template void multiply_row(const float*, const float*, const float*, std::int64_t, std::int64_t, float*);
template void multiply_row(const BFloat16*, const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, BFloat16*);
template void multiply_row(const BFloat16*, const BFloat16*, const float*, std::int64_t, std::int64_t, float*);

}  // namespace lockstep::nn::cpu
