// Matrices turned round. Internal to nn/ops/cpu.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lockstep/base/dtype.h"

namespace lockstep::nn::cpu {

/// y[c][r] = x[r][c] for r < rows, c < columns. Strides are from one row of x (of y) to the next, in elements.
inline void transpose(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, float* y,
                      std::int64_t y_stride) {
  // Four by four in registers, in an instruction set that every x86-64 has.
  using Four = float __attribute__((vector_size(16)));
  constexpr std::int64_t kFour = 4;
  const std::int64_t whole_rows = rows / kFour * kFour, whole_columns = columns / kFour * kFour;
  for (std::int64_t r = 0; r < whole_rows; r += kFour)
    for (std::int64_t c = 0; c < whole_columns; c += kFour) {
      Four in[kFour];
      for (std::int64_t i = 0; i < kFour; ++i) std::memcpy(&in[i], x + (r + i) * x_stride + c, sizeof(Four));
      const Four low01 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
      const Four low23 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
      const Four high01 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
      const Four high23 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
      const Four out[kFour] = {
          __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
          __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
      for (std::int64_t i = 0; i < kFour; ++i) std::memcpy(y + (c + i) * y_stride + r, &out[i], sizeof(Four));
    }
  for (std::int64_t c = whole_columns; c < columns; ++c)
    for (std::int64_t r = 0; r < whole_rows; ++r) y[c * y_stride + r] = x[r * x_stride + c];
  for (std::int64_t r = whole_rows; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) y[c * y_stride + r] = x[r * x_stride + c];
}

/// The same of 16 bits each: in blocks that stay in the first cache.
inline void transpose(const BFloat16* x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, BFloat16* y,
                      std::int64_t y_stride) {
  constexpr std::int64_t kBlock = 32;
  for (std::int64_t first = 0; first < rows; first += kBlock)
    for (std::int64_t c = 0; c < columns; ++c)
      for (std::int64_t r = first; r < std::min(first + kBlock, rows); ++r) y[c * y_stride + r] = x[r * x_stride + c];
}

}  // namespace lockstep::nn::cpu
