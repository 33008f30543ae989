// Where a thread stands in a matrix that is worked on column by column (ColumnPlan).
#pragma once

#include "base/cuda/device.cuh"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

struct Place {
  int line;               // of the block
  std::int64_t pack;      // of the row
  std::int64_t row, end;  // its first one, and behind the block's last
};
__device__ inline Place place_in(const ColumnPlan& plan) {
  const int lane = static_cast<int>(threadIdx.x) % plan.tile, line = static_cast<int>(threadIdx.x) / plan.tile;
  const std::int64_t begin = blockIdx.y * plan.chunk;
  return {line, std::int64_t{blockIdx.x} * plan.tile + lane, begin + line, at_most(begin + plan.chunk, plan.rows)};
}

}  // namespace lockstep::nn::cuda
