// CUDA's runtime: checked calls, and owners of what it hands out. For code that is built with CUDA alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <source_location>
#include <string>
#include <utility>

#include "base/error.h"
#include "lockstep/base/device.h"

namespace lockstep {

/// Throws CudaError naming `what`, this thread's GPU and CUDA's own words, unless `status` is success.
void check_cuda(cudaError_t status, const char* what, std::source_location where = std::source_location::current());

inline cudaStream_t native(StreamView stream) { return static_cast<cudaStream_t>(stream.native); }

/// Owns a stream of the GPU that is current when it is made. It does not wait for the default stream.
class CudaStream {
 public:
  enum class Priority { kNormal, kHigh };
  explicit CudaStream(Priority priority = Priority::kNormal);
  CudaStream(CudaStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  CudaStream& operator=(CudaStream other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~CudaStream();

  cudaStream_t get() const { return stream_; }
  StreamView view() const { return {stream_}; }
  /// Blocks until all that was given to it is done. Not for steps: AsyncDownload is.
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// Owns an event: a mark in a stream that other streams, or the host, can wait for.
class CudaEvent {
 public:
  enum class Timing { kOff, kOn };
  explicit CudaEvent(Timing timing = Timing::kOff);
  CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  CudaEvent& operator=(CudaEvent other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~CudaEvent();

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream);
  /// What is given to `stream` from now on comes after the last record(); at once if there was none.
  void make_wait(cudaStream_t stream) const;
  /// Whether all that came before the last record() is done. Throws what the stream failed with.
  bool done() const;
  void synchronize() const;
  /// done(), or within a second of the host's time, or failed; but while an exception unwinds, nobody waits (Note
  /// [Unwinding]). For destructors.
  bool done_soon() const noexcept;
  /// Between two that are done and have timing.
  static double ms_between(const CudaEvent& from, const CudaEvent& to);

 private:
  cudaEvent_t event_ = nullptr;
};

/// Host memory that GPUs copy from and to without the host's help. 4096-byte aligned, not zeroed.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  /// Throws CudaError saying how much was asked.
  explicit PinnedMemory(std::size_t bytes);
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// It is never given back, which would wait for all that the GPU was given.
  void abandon() { data_ = nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// "GPU 1 (NVIDIA H100 80GB HBM3, 0000:1b:00.0)": this thread's, as far as CUDA still answers.
std::string current_gpu_text();

}  // namespace lockstep
