#include "comm/nccl/count_up.h"

#include "base/cuda/device.cuh"

namespace lockstep::comm {
namespace {

__global__ void count_up(std::uint64_t* count, std::uint64_t* word) {
  const std::uint64_t next = *count + 1;
  *count = next;
  *word = next;
}

}  // namespace

void launch_count_up(std::uint64_t* count, std::uint64_t* word, StreamView stream) {
  launch("counting operations", count_up, dim3(1), dim3(1), stream, count, word);
}

}  // namespace lockstep::comm
