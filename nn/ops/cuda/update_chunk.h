// Many arrays in one launch: how they become a kernel's parameter, and which block works on which.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/ops/optim.h"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

/// Arrays of at least one element. arrays[i] is the work of blocks [first_block[i], first_block[i + 1]), which have
/// equally many elements each, but for the last.
struct UpdateChunk {
  static constexpr int kMost = 56;  // so that a kernel's parameters stay below the 4 KiB that every GPU takes
  UpdateArrays arrays[kMost];
  std::uint32_t first_block[kMost + 1] = {};
  std::int32_t size = 0;

  constexpr std::uint32_t blocks() const { return first_block[size]; }
  /// The array of `block`, which is below blocks().
  constexpr int array_of(std::uint32_t block) const {
    int low = 0, high = size;  // first_block[low] <= block < first_block[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_block[middle] <= block)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};
static_assert(std::is_trivially_copyable_v<UpdateChunk> && sizeof(UpdateChunk) <= 3904);

/// Calls run(chunk) for `all`, in their order, with `per_block` elements a block. Arrays of no elements are left out,
/// so that whoever counts those of the chunks counts the others.
template <class F>
void for_chunks(std::span<const UpdateArrays> all, std::int64_t per_block, F&& run) {
  UpdateChunk chunk;
  for (const UpdateArrays& arrays : all) {
    if (arrays.count == 0) continue;
    const std::int64_t blocks = ceil_div(arrays.count, per_block);
    if (chunk.size == UpdateChunk::kMost || (chunk.size > 0 && chunk.blocks() + blocks > kMostBlocks)) {
      run(std::as_const(chunk));
      chunk.size = 0;
    }
    LOCKSTEP_ASSERT(blocks <= kMostBlocks, "an update of {} elements", arrays.count);
    chunk.arrays[chunk.size] = arrays;
    chunk.first_block[chunk.size + 1] = chunk.first_block[chunk.size] + static_cast<std::uint32_t>(blocks);
    ++chunk.size;
  }
  if (chunk.size > 0) run(std::as_const(chunk));
}

}  // namespace lockstep::nn::cuda
