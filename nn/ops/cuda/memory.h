// Memory of one GPU, and the host memory that it copies from.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/base/device.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Makes `device` the calling thread's: calls of CUDA's make a context on the device that their thread has, a new
/// thread's being 0. What it had before is not put back, which would make one there.
void make_current(int device);

/// Device memory from a pool of its own that gives nothing back to the system while it lives. A piece may be used in
/// `stream` at once, in another stream after an event that `stream` has recorded since; it is freed in the order of
/// `stream`, which must outlive this.
class DeviceMemory final : public MemorySource {
 public:
  DeviceMemory(int device, cudaStream_t stream);
  ~DeviceMemory() override;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Throws OutOfMemoryError with the GPU and what was asked, held and free there; CudaError while `stream`'s work is
  /// captured.
  std::byte* allocate(std::size_t bytes) override;
  void free(std::byte* data, std::size_t bytes) noexcept override;
  /// From then on it is freed in the order of the default stream.
  void outlive_device() noexcept override { stream_ = nullptr; }
  Device device() const override { return {.kind = DeviceKind::kCuda, .index = device_}; }

  /// Lets GPU `other`, which has a context in this process, copy from here without the host, where the two can.
  void share_with(int other);

 private:
  cudaError_t take(void*& data, std::size_t bytes);

  int device_;
  cudaStream_t stream_;
  cudaMemPool_t pool_ = nullptr;
  std::atomic<std::size_t> held_{0};
  std::mutex mutex_;
  std::vector<int> asked_;  // share_with() has been called for these
};

/// Pinned host memory, for any thread; may outlive the backend. What is freed while it is still read, as `all_read`
/// says, stays until the process ends (Note [Unwinding]).
class PinnedSource final : public MemorySource {
 public:
  PinnedSource(int device, std::shared_ptr<const CudaEvent> all_read)
      : device_(device), all_read_(std::move(all_read)) {}
  std::byte* allocate(std::size_t bytes) override;
  void free(std::byte* data, std::size_t bytes) noexcept override;
  void wait_until_read() override { all_read_->synchronize(); }

 private:
  int device_;
  std::shared_ptr<const CudaEvent> all_read_;
  std::mutex mutex_;
  std::unordered_map<std::byte*, PinnedMemory> given_;
};

// Copies between a GPU and the host that the host waits for: outside of steps.

/// Between the host's bytes and as many of a tensor's first ones, in the order of the stream.
void copy_to_device(Context& context, std::span<const std::byte> from, const Tensor& to);
void copy_to_host(Context& context, const Tensor& from, std::span<std::byte> to);
/// All of a tensor's, after those that `to` has.
void append_bytes(Context& context, const Tensor& from, std::vector<std::byte>& to);

/// `values` as `dtype`, f32, bf16 or f16, in new memory.
Tensor upload_as(Context& context, std::span<const float> values, DType dtype);

constexpr std::size_t kMostWritten = 64;

/// Puts at most kMostWritten bytes to device memory `to`, in the order of `stream`. They travel with the kernel: `from`
/// may be changed at once, and no host memory needs to live on.
void write_bytes(std::span<const std::byte> from, void* to, StreamView stream);

/// Whether this build's kernels were compiled for the current GPU.
bool kernels_run_here();

}  // namespace lockstep::nn::cuda
