// What runs on the GPU beside NCCL's own kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"

namespace lockstep::comm {

/// CompletionWord's: adds 1 to `count` on the GPU, and shows it in `word`, host memory that the GPU can write.
void launch_count_up(std::uint64_t* count, std::uint64_t* word, StreamView stream);

/// Partial sums in the order of their leaves, and how they are added (TreeProgram): a kernel's parameter, of which a
/// launch takes 4 KB.
struct TreeSources {
  static constexpr std::size_t kMost = 224;

  const std::byte* at[kMost];
  std::uint8_t additions[kMost];
  int count = 0;
};

/// to[i] = the sum of all sources' i-th elements, `dtype` f32 or f64. `to` may be one of them.
void launch_sum_along_tree(const TreeSources& sources, DType dtype, std::byte* to, std::size_t count,
                           StreamView stream);

}  // namespace lockstep::comm
