#include "nn/ops/cuda/memory.h"

#include "base/cuda/device.cuh"
#include "base/error.h"

namespace lockstep::nn::cuda {
namespace {

struct Payload {
  unsigned char bytes[kMostWritten];
};

__global__ void write_kernel(Payload payload, unsigned count, unsigned char* to) {
  if (threadIdx.x < count) to[threadIdx.x] = payload.bytes[threadIdx.x];
}

}  // namespace

void write_bytes(std::span<const std::byte> from, void* to, StreamView stream) {
  if (from.empty()) return;
  LOCKSTEP_ASSERT(from.size() <= kMostWritten, "{} bytes", from.size());
  Payload payload{};
  for (std::size_t i = 0; i < from.size(); ++i) payload.bytes[i] = static_cast<unsigned char>(from[i]);
  launch("write", write_kernel, dim3(1), dim3(kMostWritten), stream, payload, static_cast<unsigned>(from.size()),
         static_cast<unsigned char*>(to));
}

bool kernels_run_here() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&write_kernel));
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check_cuda(status, "asking for a kernel");
  return true;
}

}  // namespace lockstep::nn::cuda
