// Small results on their way from a GPU to the host.
#pragma once

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::cuda {

// Note [Unwinding]
// An exception may leave collectives under way that the other ranks no longer take part in, and the GPU waits for them
// until their communicator is aborted, which comes last. Whatever is let go of before must not wait for the GPU: what
// it may still read or write stays where it is until the process ends. An exception that was caught before leaves the
// same, and a destructor cannot know: it waits for a second, and no longer.

/// Of the GPU that is current when it is made. Its stream must outlive it.
class CudaAsyncDownload final : public AsyncDownload {
 public:
  CudaAsyncDownload(StreamView stream, std::size_t bytes) : stream_(stream), memory_(bytes) {}
  /// See Note [Unwinding].
  ~CudaAsyncDownload() override;
  CudaAsyncDownload(const CudaAsyncDownload&) = delete;
  CudaAsyncDownload& operator=(const CudaAsyncDownload&) = delete;

  void begin(const Tensor& from) override;
  bool ready() override { return arrived_.done(); }
  std::span<const std::byte> bytes() const override { return {memory_.data(), used_}; }

 private:
  StreamView stream_;
  PinnedMemory memory_;
  CudaEvent arrived_;
  std::size_t used_ = 0;
};

}  // namespace lockstep::nn::cuda
