// Matrices that are worked on column by column (ColumnPlan): where a thread stands, and two sums of each column.
#pragma once

#include "base/cuda/device.cuh"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

struct Place {
  int line;               // of the block
  std::int64_t pack;      // of the row
  std::int64_t row, end;  // its first one, and after the block's last
};
__device__ inline Place place_in(const ColumnPlan& plan) {
  const int lane = static_cast<int>(threadIdx.x) % plan.tile, line = static_cast<int>(threadIdx.x) / plan.tile;
  const std::int64_t begin = blockIdx.y * plan.chunk;
  return {line, std::int64_t{blockIdx.x} * plan.tile + lane, begin + line, at_most(begin + plan.chunk, plan.rows)};
}

// The end of a first stage (Note [Two stages] in norm.cu) in which each thread has added up its rows of kWidth columns:
// parts (chunks, 2, C) gets the block's sums. All threads of the block take part.
template <int kWidth>
__device__ inline void leave_sums(const ColumnPlan& plan, const Place& at, const float (&first)[kWidth],
                                  const float (&second)[kWidth], float* parts) {
  __shared__ float firsts[kWidth][kBlock], seconds[kWidth][kBlock];
  const int t = static_cast<int>(threadIdx.x);
  for (int k = 0; k < kWidth; ++k) {
    firsts[k][t] = first[k];
    seconds[k][t] = second[k];
  }
  for (int step = plan.lines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (at.line < step)
      for (int k = 0; k < kWidth; ++k) {
        firsts[k][t] += firsts[k][t + step * plan.tile];
        seconds[k][t] += seconds[k][t + step * plan.tile];
      }
  }
  if (at.line > 0 || at.pack >= plan.packs) return;
  const std::int64_t columns = plan.packs * kWidth;
  float* const to = parts + blockIdx.y * 2 * columns + at.pack * kWidth;
  for (int k = 0; k < kWidth; ++k) {
    to[k] = firsts[k][t];
    to[columns + k] = seconds[k][t];
  }
}

constexpr int kPartBlocks = 512;  // of a first stage: several for each multiprocessor, all of them at once
constexpr int kJoinColumns = 8;   // of a block of the second stage: a sector of f32, and many threads for each

struct ColumnSums {
  std::int64_t column;
  bool known;  // to this thread: one of each column has the sums
  float first, second;
};
// The second stage: a block has kJoinColumns columns, and kBlock / kJoinColumns threads for the chunks of each. Without
// chunks: zeros. All threads of the block take part.
__device__ inline ColumnSums join_sums(std::int64_t chunks, std::int64_t columns, const float* parts) {
  constexpr int kLines = kBlock / kJoinColumns;
  __shared__ float firsts[kBlock], seconds[kBlock];
  const int t = static_cast<int>(threadIdx.x), line = t / kJoinColumns;
  const std::int64_t column = std::int64_t{blockIdx.x} * kJoinColumns + t % kJoinColumns;
  float first = 0.0f, second = 0.0f;
  if (column < columns) {
    for (std::int64_t chunk = line; chunk < chunks; chunk += kLines) {
      first += parts[chunk * 2 * columns + column];
      second += parts[chunk * 2 * columns + columns + column];
    }
  }
  firsts[t] = first;
  seconds[t] = second;
  for (int step = kLines / 2; step > 0; step /= 2) {
    __syncthreads();
    if (line < step) {
      firsts[t] += firsts[t + step * kJoinColumns];
      seconds[t] += seconds[t + step * kJoinColumns];
    }
  }
  return {column, line == 0 && column < columns, firsts[t], seconds[t]};
}

}  // namespace lockstep::nn::cuda
