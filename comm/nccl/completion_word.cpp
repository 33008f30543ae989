#include "comm/nccl/completion_word.h"

#include <cstring>

#include "comm/nccl/count_up.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kDeviceBytes = 128;

}  // namespace

CompletionWord::CompletionWord() : host_(4096) {
  std::memset(host_.data(), 0, host_.bytes());
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, kDeviceBytes), "allocating memory");
  device_ = static_cast<std::byte*>(memory);
  const CudaStream stream;
  check_cuda(cudaMemsetAsync(device_, 0, kDeviceBytes, stream.get()), "zeroing memory");
  stream.synchronize();
}

CompletionWord::~CompletionWord() { static_cast<void>(cudaFree(device_)); }

void CompletionWord::count_up(StreamView stream) {
  launch_count_up(reinterpret_cast<std::uint64_t*>(device_), reinterpret_cast<std::uint64_t*>(host_.data()), stream);
}

}  // namespace lockstep::comm
