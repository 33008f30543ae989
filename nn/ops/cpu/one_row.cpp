#include "nn/ops/cpu/one_row.h"

#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kLanes = 16;
// Rows of w side by side: their sums do not wait for each other.
constexpr int kRows = 4;
constexpr std::int64_t kGrain = 16384;  // elements of w that are worth a thread

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// Rows [begin, end) of w. Locals alone are vectors: nothing of them crosses a call.
LOCKSTEP_SIMD_CLONES
void multiply_rows(const float* x, const float* w, const float* b, std::int64_t in, std::int64_t begin,
                   std::int64_t end, float* y) {
  const std::int64_t whole = in / kLanes * kLanes;
  for (std::int64_t first = begin; first < end; first += kRows) {
    const int rows = static_cast<int>(end - first < kRows ? end - first : kRows);
    Lanes sums[kRows] = {};
    const float* const from = w + first * in;
    if (rows == kRows) {
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        Lanes xs, ws;
        std::memcpy(&xs, x + i, sizeof xs);
        for (int r = 0; r < kRows; ++r) {
          std::memcpy(&ws, from + r * in + i, sizeof ws);
          sums[r] += xs * ws;
        }
      }
    } else {
      for (int r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < whole; i += kLanes) {
          Lanes xs, ws;
          std::memcpy(&xs, x + i, sizeof xs);
          std::memcpy(&ws, from + r * in + i, sizeof ws);
          sums[r] += xs * ws;
        }
    }
    for (int r = 0; r < rows; ++r) {
      float lane[kLanes];
      std::memcpy(lane, &sums[r], sizeof lane);
      for (std::int64_t i = whole, l = 0; i < in; ++i, ++l) lane[l] += x[i] * from[r * in + i];
      for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
        for (std::int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
      y[first + r] = lane[0] + (b != nullptr ? b[first + r] : 0.0f);
    }
  }
}

}  // namespace

void multiply_row(const float* x, const float* w, const float* b, std::int64_t in, std::int64_t out, float* y) {
  const std::int64_t blocks = (out + kRows - 1) / kRows;
  parallel_for(blocks, kGrain / (kRows * (in > 0 ? in : 1)), [&](std::int64_t begin, std::int64_t end) {
    multiply_rows(x, w, b, in, begin * kRows, std::min(end * kRows, out), y);
  });
}

}  // namespace lockstep::nn::cpu
