#include "base/cuda/runtime.h"

#include <array>
#include <chrono>
#include <exception>
#include <thread>

#include "base/text.h"
#include "lockstep/base/deadline.h"

namespace lockstep {

std::string current_gpu_text() {
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return "a GPU";
  std::array<char, 32> bus_id{};
  cudaDeviceProp properties{};
  if (cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index) != cudaSuccess ||
      cudaGetDeviceProperties(&properties, index) != cudaSuccess)
    return fmt::format("GPU {}", index);
  return fmt::format("GPU {} ({}, {})", index, properties.name, bus_id.data());
}

void check_cuda(cudaError_t status, const char* what, std::source_location where) {
  if (status == cudaSuccess) [[likely]]
    return;
  static_cast<void>(cudaGetLastError());  // so that the next call is not blamed for it
  throw CudaError(fmt::format("{} failed on {}: {} ({})", what, current_gpu_text(), cudaGetErrorString(status),
                              cudaGetErrorName(status)),
                  "look at nvidia-smi and the kernel's log (dmesg) for that GPU", where);
}

CudaStream::CudaStream(Priority priority) {
  int lowest = 0, highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for stream priorities");
  check_cuda(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == Priority::kHigh ? highest : lowest),
      "making a stream");
}

CudaStream::~CudaStream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void CudaStream::synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "waiting for a stream"); }

CudaEvent::CudaEvent(Timing timing) {
  check_cuda(cudaEventCreateWithFlags(&event_, timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming),
             "making an event");
}

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void CudaEvent::record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "recording an event"); }

void CudaEvent::make_wait(cudaStream_t stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "ordering two streams");
}

bool CudaEvent::done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // it is noted as if it were an error
    return false;
  }
  check_cuda(status, "work on a stream");
  return true;
}

void CudaEvent::synchronize() const { check_cuda(cudaEventSynchronize(event_), "work on a stream"); }

bool CudaEvent::done_soon() const noexcept {
  const Deadline deadline = Deadline::after(std::chrono::seconds(std::uncaught_exceptions() > 0 ? 0 : 1));
  while (cudaEventQuery(event_) == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

double CudaEvent::ms_between(const CudaEvent& from, const CudaEvent& to) {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, from.event_, to.event_), "timing events");
  return static_cast<double>(ms);
}

PinnedMemory::PinnedMemory(std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  if (bytes > 0 && cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw CudaError(fmt::format("no {} of host memory could be pinned", human_bytes(static_cast<double>(bytes))),
                    "use a smaller batch or fewer data workers, or raise the limit of locked memory (ulimit -l)");
  }
  data_ = static_cast<std::byte*>(memory);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

}  // namespace lockstep
