#include "nn/ops/cpu/one_row.h"

#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kLanes = 16;
// Rows of w side by side: their sums do not wait for each other.
constexpr int kRows = 4;
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

}  // namespace

template <class X, class Y>
void multiply_row(const X* x, const X* w, const Y* b, std::int64_t in, std::int64_t out, Y* y) {
  const std::int64_t blocks = (out + kRows - 1) / kRows;
  parallel_for(blocks, kGrain / (kRows * (in > 0 ? in : 1)), [&](std::int64_t begin, std::int64_t end) {
    multiply_rows(x, w, b, in, begin * kRows, std::min(end * kRows, out), y);
  });
}

template void multiply_row(const float*, const float*, const float*, std::int64_t, std::int64_t, float*);
template void multiply_row(const BFloat16*, const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, BFloat16*);
template void multiply_row(const BFloat16*, const BFloat16*, const float*, std::int64_t, std::int64_t, float*);

}  // namespace lockstep::nn::cpu
