// Matrices that are worked on column by column (ColumnPlan): where a thread stands, and sums of each column.
#pragma once

#include <type_traits>

#include "base/cuda/device.cuh"
#include "nn/ops/cuda/grid.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {

// Note [Two stages]
// A column's sums are made in two stages: each block of the first has some columns and a chunk of the rows and leaves
// its part in memory; the second goes over the chunks. How rows are cut depends on the shape alone, and everything is
// added in a fixed order: the same input gives the same bits.

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

// Calls visit(n, row) for the thread's rows, n of them at once, plan.lines apart: kAtOnce where there are so many, or
// 1, as a constant. So loads of whole groups depend on nothing, and all of them are on their way together.
template <int kAtOnce, class F>
__device__ void for_rows(const ColumnPlan& plan, const Place& at, F&& visit) {
  std::int64_t row = at.row;
  for (; row + (kAtOnce - 1) * plan.lines < at.end; row += kAtOnce * plan.lines)
    visit(std::integral_constant<int, kAtOnce>{}, row);
  for (; row < at.end; row += plan.lines) visit(std::integral_constant<int, 1>{}, row);
}
// The same groups from the last one to the first.
template <int kAtOnce, class F>
__device__ void for_rows_back(const ColumnPlan& plan, const Place& at, F&& visit) {
  int left = at.row < at.end ? (static_cast<int>(at.end - at.row) + plan.lines - 1) / plan.lines : 0;
  while (left % kAtOnce != 0) {
    --left;
    visit(std::integral_constant<int, 1>{}, at.row + std::int64_t{left} * plan.lines);
  }
  while (left > 0) {
    left -= kAtOnce;
    visit(std::integral_constant<int, kAtOnce>{}, at.row + std::int64_t{left} * plan.lines);
  }
}

// The end of a first stage in which each thread has added up its rows of kWidth columns: calls leave(column, its sums
// over the block's rows) in one thread for each column. All threads of the block take part; those without columns have
// zeros.
template <int kSums, int kWidth, class F>
__device__ void leave_sums(const ColumnPlan& plan, float (&mine)[kSums][kWidth], F&& leave) {
  constexpr int kWarps = kBlock / kWarp, kPitch = kWarp + kWarp / kWidth;  // of which 32 columns lie in all banks
  __shared__ float held[kSums][kWarps][kWidth][kPitch];
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarp, warp = t / kWarp;
  for (int step = plan.tile; step < kWarp; step *= 2)
    for (auto& sums : mine)
      for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane < plan.tile)
    for (int s = 0; s < kSums; ++s)
      for (int k = 0; k < kWidth; ++k) held[s][warp][k][lane] = mine[s][k];
  __syncthreads();
  const std::int64_t column = std::int64_t{blockIdx.x} * plan.tile * kWidth + t;
  if (t >= plan.tile * kWidth || column >= plan.packs * kWidth) return;
  float made[kSums] = {};
  for (int s = 0; s < kSums; ++s)
    for (int w = 0; w < kWarps; ++w) made[s] += held[s][w][t % kWidth][t / kWidth];
  leave(column, made);
}

// The same for what is added up as it is: parts (chunks, kSums, C).
template <int kSums, int kWidth>
__device__ void leave_sums(const ColumnPlan& plan, float (&mine)[kSums][kWidth], float* parts) {
  leave_sums(plan, mine, [&](std::int64_t column, const float(&made)[kSums]) {
    for (int s = 0; s < kSums; ++s)
      parts[(std::int64_t{blockIdx.y} * kSums + s) * plan.packs * kWidth + column] = made[s];
  });
}

constexpr int kPartBlocks = 512;  // of a first stage: four for each of 132 multiprocessors, all of them at once
constexpr int kJoinBlock = 512;   // threads of the second stage
constexpr int kJoinColumns = 8;   // of its blocks: a sector of f32, and many threads for each
constexpr int kJoinLines = kJoinBlock / kJoinColumns;
constexpr int kJoinAtOnce = kPartBlocks / kJoinLines;  // parts on their way to a thread: all, as a rule

struct JoinPlace {
  int line;
  std::int64_t column;
};
__device__ inline JoinPlace join_place() {
  const int t = static_cast<int>(threadIdx.x);
  return {t / kJoinColumns, std::int64_t{blockIdx.x} * kJoinColumns + t % kJoinColumns};
}

// Over the block's lines: the first one's threads have it, for their columns. All threads of the block take part.
template <int kSums>
__device__ Numbers<kSums> sum_of_lines(Numbers<kSums> mine) {
  constexpr int kWarps = kJoinBlock / kWarp;
  __shared__ float held[kWarps][kSums][kJoinColumns];
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarp, warp = t / kWarp;
  const auto join_lanes = [](Numbers<kSums>& sums) {
    for (int step = kJoinColumns; step < kWarp; step *= 2)
      for (float& sum : sums.of) sum += __shfl_xor_sync(kAllLanes, sum, step);
  };
  join_lanes(mine);
  if (lane < kJoinColumns)
    for (int s = 0; s < kSums; ++s) held[warp][s][lane] = mine.of[s];
  __syncthreads();
  if (warp > 0) return mine;
  Numbers<kSums> all = {};
  for (int w = lane / kJoinColumns; w < kWarps; w += kWarp / kJoinColumns)
    for (int s = 0; s < kSums; ++s) all.of[s] += held[w][s][lane % kJoinColumns];
  join_lanes(all);
  return all;
}

// The second stage for parts (chunks, kSums, C). Without chunks: zeros. All threads of the block take part.
template <int kSums>
__device__ Numbers<kSums> join_sums(std::int64_t chunks, std::int64_t columns, const float* parts) {
  const JoinPlace at = join_place();
  Numbers<kSums> mine = {};
  for (std::int64_t chunk = at.line; chunk < chunks; chunk += kJoinAtOnce * kJoinLines) {
    Numbers<kSums> some[kJoinAtOnce] = {};
    for (int i = 0; i < kJoinAtOnce; ++i)
      for (int s = 0; s < kSums; ++s)
        if (at.column < columns && chunk + i * kJoinLines < chunks)
          some[i].of[s] = parts[((chunk + i * kJoinLines) * kSums + s) * columns + at.column];
    for (int i = 0; i < kJoinAtOnce; ++i)
      for (int s = 0; s < kSums; ++s) mine.of[s] += some[i].of[s];
  }
  return sum_of_lines(mine);
}

}  // namespace lockstep::nn::cuda
