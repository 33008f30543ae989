#include "nn/ops/cuda/memory.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"

namespace lockstep::nn::cuda {
namespace {

// What a stream was given may wait for a rank that is gone: whoever runs out of memory then must still get to say so.
void wait_a_while(cudaStream_t stream) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  while (cudaStreamQuery(stream) == cudaErrorNotReady && !deadline.expired())
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  static_cast<void>(cudaGetLastError());  // "not ready" is noted as if it were an error; a real one is reported again
}

}  // namespace

void make_current(int device) {
  int current = -1;
  check_cuda(cudaGetDevice(&current), "asking for the current GPU");
  if (current != device) check_cuda(cudaSetDevice(device), "choosing a GPU");
}

DeviceMemory::DeviceMemory(int device, cudaStream_t stream) : device_(device), stream_(stream) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;  // the only type that there is
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check_cuda(cudaMemPoolCreate(&pool_, &properties), "making a memory pool");
  std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
  check_cuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold), "setting up a memory pool");
}

DeviceMemory::~DeviceMemory() { cudaMemPoolDestroy(pool_); }

std::byte* DeviceMemory::allocate(std::size_t bytes) {
  make_current(device_);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_, &capture), "asking whether work is being captured");
  if (capture != cudaStreamCaptureStatusNone)  // it would belong to the graph
    throw CudaError(fmt::format("{} of new memory were asked for while work is being captured",
                                human_bytes(static_cast<double>(bytes))),
                    "run the work once before it is captured");
  void* data = nullptr;
  cudaError_t status = take(data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    // What the pool holds may be in other pieces: they become one when the system has them back, and that takes them
    // when nothing uses them any more.
    wait_a_while(stream_);
    check_cuda(cudaMemPoolTrimTo(pool_, 0), "giving back memory");
    status = take(data, bytes);
  }
  if (status == cudaErrorMemoryAllocation) {
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
    const auto text = [](std::size_t n) { return human_bytes(static_cast<double>(n)); };
    throw OutOfMemoryError(
        fmt::format("{} is out of memory: {} more were asked for; this process holds {}, {} of {} are free",
                    current_gpu_text(), text(bytes), text(held_), text(free), text(total)),
        "use a smaller batch or model, or see with nvidia-smi who else uses that GPU");
  }
  check_cuda(status, "allocating memory");
  held_ += bytes;
  return static_cast<std::byte*>(data);
}

cudaError_t DeviceMemory::take(void*& data, std::size_t bytes) {
  const cudaError_t status = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
  if (status == cudaErrorMemoryAllocation) static_cast<void>(cudaGetLastError());
  return status;
}

void DeviceMemory::free(std::byte* data, std::size_t bytes) noexcept {
  cudaSetDevice(device_);
  cudaFreeAsync(data, stream_);
  held_ -= bytes;
}

void DeviceMemory::share_with(int other) {
  const std::lock_guard lock(mutex_);
  if (other == device_ || std::ranges::find(asked_, other) != asked_.end()) return;
  asked_.push_back(other);
  int can = 0;
  check_cuda(cudaDeviceCanAccessPeer(&can, other, device_), "asking whether two GPUs reach each other");
  if (can == 0) return;
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = other;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  // Where it cannot be, copies go by way of the host.
  if (cudaMemPoolSetAccess(pool_, &access, 1) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

std::byte* PinnedSource::allocate(std::size_t bytes) {
  make_current(device_);
  PinnedMemory memory(bytes);
  std::byte* const data = memory.data();
  const std::lock_guard lock(mutex_);
  given_.emplace(data, std::move(memory));
  return data;
}

void PinnedSource::free(std::byte* data, std::size_t) noexcept {
  cudaSetDevice(device_);
  const bool read = all_read_->done_soon();
  const std::lock_guard lock(mutex_);
  const auto at = given_.find(data);
  if (!read) at->second.abandon();
  given_.erase(at);
}

void copy_to_device(Context& context, std::span<const std::byte> from, const Tensor& to) {
  LOCKSTEP_ASSERT(from.size() <= to.bytes(), "{} bytes into {}", from.size(), to.bytes());
  if (from.empty()) return;
  const cudaStream_t stream = native(context.stream);
  check_cuda(cudaMemcpyAsync(to.raw(), from.data(), from.size(), cudaMemcpyHostToDevice, stream), "uploading");
  check_cuda(cudaStreamSynchronize(stream), "uploading");
}

void copy_to_host(Context& context, const Tensor& from, std::span<std::byte> to) {
  LOCKSTEP_ASSERT(to.size() <= from.bytes(), "{} bytes of {}", to.size(), from.bytes());
  if (to.empty()) return;
  const cudaStream_t stream = native(context.stream);
  check_cuda(cudaMemcpyAsync(to.data(), from.raw(), to.size(), cudaMemcpyDeviceToHost, stream), "downloading");
  check_cuda(cudaStreamSynchronize(stream), "downloading");
}

void append_bytes(Context& context, const Tensor& from, std::vector<std::byte>& to) {
  const std::size_t before = to.size();
  to.resize(before + from.bytes());
  copy_to_host(context, from, std::span(to).subspan(before));
}

template <class Half>
void upload_rounded(Context& context, std::span<const float> values, const Tensor& to) {
  std::vector<Half> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), Half::from_float);
  copy_to_device(context, std::as_bytes(std::span(rounded)), to);
}

Tensor upload_as(Context& context, std::span<const float> values, DType dtype) {
  const Tensor made = Tensor::empty(context.allocator, {static_cast<std::int64_t>(values.size())}, dtype);
  if (dtype == DType::kBF16) {
    upload_rounded<BFloat16>(context, values, made);
  } else if (dtype == DType::kF16) {
    upload_rounded<Float16>(context, values, made);
  } else {
    LOCKSTEP_ASSERT(dtype == DType::kF32, "floats as {}", name_of(dtype));
    copy_to_device(context, std::as_bytes(values), made);
  }
  return made;
}

}  // namespace lockstep::nn::cuda
