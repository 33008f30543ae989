#include "comm/nccl/kernels.h"

#include <algorithm>

#include "base/cuda/device.cuh"

namespace lockstep::comm {
namespace {

__global__ void count_up(std::uint64_t* count, std::uint64_t* word) {
  const std::uint64_t next = *count + 1;
  *count = next;
  *word = next;
}

constexpr int kBlock = 256;
constexpr std::size_t kMostBlocks = 1024;
// ReductionTree::kMostDepth.
constexpr int kDepth = 17;

template <class T>
__global__ void __launch_bounds__(kBlock) sum_along_tree(TreeSources sources, T* to, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < count; i += stride) {
    T waiting[kDepth];
    T next{};
    int depth = 0;
    for (int s = 0; s < sources.count; ++s) {
      next = reinterpret_cast<const T*>(sources.at[s])[i];
      for (int n = sources.additions[s]; n > 0; --n) next = waiting[--depth] + next;
      waiting[depth++] = next;
    }
    to[i] = next;
  }
}

template <class T>
void start(const TreeSources& sources, std::byte* to, std::size_t count, StreamView stream) {
  const auto blocks = static_cast<unsigned>(std::min((count + kBlock - 1) / kBlock, kMostBlocks));
  launch("adding partial sums", sum_along_tree<T>, dim3(blocks), dim3(kBlock), stream, sources,
         reinterpret_cast<T*>(to), static_cast<std::int64_t>(count));
}

}  // namespace

void launch_count_up(std::uint64_t* count, std::uint64_t* word, StreamView stream) {
  launch("counting operations", count_up, dim3(1), dim3(1), stream, count, word);
}

void launch_sum_along_tree(const TreeSources& sources, DType dtype, std::byte* to, std::size_t count,
                           StreamView stream) {
  if (dtype == DType::kF32)
    start<float>(sources, to, count, stream);
  else
    start<double>(sources, to, count, stream);
}

}  // namespace lockstep::comm
