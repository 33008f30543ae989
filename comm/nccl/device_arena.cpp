#include "comm/nccl/device_arena.h"

#include <limits>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/device.h"

namespace lockstep::comm {
namespace {

/// nullptr where there is none.
std::byte* take_from_cuda(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  check_cuda(status, "allocating memory");
  return static_cast<std::byte*>(data);
}

[[noreturn]] void throw_no_memory(std::size_t bytes) {
  std::size_t free = 0, total = 0;
  std::string left;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess)
    left = fmt::format(": {} of {} are free", human_bytes(static_cast<double>(free)),
                       human_bytes(static_cast<double>(total)));
  throw CudaError(fmt::format("{} has no {} for a collective's data{}", current_gpu_text(),
                              human_bytes(static_cast<double>(bytes)), left),
                  "use a smaller model or batch, or a GPU that nobody else uses");
}

}  // namespace

void check_device(int device) {
  const CudaProbe& probe = probe_cuda();
  if (probe.devices == 0) throw DeviceError(probe.problem, probe.remedy);
  if (device < 0 || device >= probe.devices)
    throw DeviceError(fmt::format("there is no GPU {}: this process may see {}", device, probe.devices),
                      "look at CUDA_VISIBLE_DEVICES and at how many ranks are started on this host");
}

void DeviceArena::check_size(std::size_t bytes) {
  // Allocators round sizes up: these overflow.
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
}

std::unique_ptr<DeviceArena> DeviceArena::allocate(std::size_t bytes, std::shared_ptr<Communicator> communicator) {
  if (bytes == 0)
    return std::unique_ptr<DeviceArena>(new DeviceArena(nullptr, 0, Source::kNone, 0, std::move(communicator)));
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current GPU");
  Source source = Source::kCuda;
  std::byte* data = nullptr;
  if (communicator != nullptr) {
    void* memory = nullptr;
    const ncclResult_t result = communicator->api().mem_alloc(&memory, bytes);
    if (result == ncclSuccess) {
      data = static_cast<std::byte*>(memory);
      source = Source::kNccl;
    } else {
      static_cast<void>(cudaGetLastError());
      log_debug("NCCL allocates no {}: {}", human_bytes(static_cast<double>(bytes)),
                nccl_error_text(communicator->api(), communicator->get(), result));
    }
  }
  if (data == nullptr) data = take_from_cuda(bytes);
  if (data == nullptr) throw_no_memory(bytes);
  auto arena = std::unique_ptr<DeviceArena>(new DeviceArena(data, bytes, source, device, std::move(communicator)));
  const CudaStream stream;
  check_cuda(cudaMemsetAsync(data, 0, bytes, stream.get()), "zeroing memory");
  stream.synchronize();
  if (source == Source::kNccl) arena->register_it();
  return arena;
}

void DeviceArena::register_it() {
  const NcclApi& api = communicator_->api();
  void* registration = nullptr;
  const ncclResult_t result =
      communicator_->settle(api.comm_register(communicator_->get(), data(), bytes(), &registration), [] {});
  if (result == ncclSuccess)
    registration_ = registration;
  else
    log_debug("NCCL registers no {}: {}", human_bytes(static_cast<double>(bytes())),
              nccl_error_text(api, communicator_->get(), result));
}

void DeviceArena::deregister() {
  if (registration_ == nullptr) return;
  void* const registration = std::exchange(registration_, nullptr);
  if (communicator_->state() != Communicator::State::kReady) return;
  const ncclResult_t result = communicator_->api().comm_deregister(communicator_->get(), registration);
  if (result != ncclSuccess)
    log_debug("NCCL does not deregister memory: {}",
              nccl_error_text(communicator_->api(), communicator_->get(), result));
}

DeviceArena::~DeviceArena() {
  if (!detach() || source_ == Source::kNone) return;
  if (communicator_ != nullptr && communicator_->state() == Communicator::State::kAborted) return;
  // Its operations are over. What others were given to do with it may not be: optimizers, copies out of it, streams of
  // a program's own. NCCL unmaps at once, and that cudaFree() waits for the GPU is nowhere promised. Whoever reads it
  // is not known to the group, so it is all of the GPU that is waited for, once in an arena's life. After an error of
  // the GPU nothing can be freed any more.
  if (cudaSetDevice(device_) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return;
  deregister();
  // Whatever these say: nobody can do anything about it here.
  if (source_ == Source::kNccl)
    static_cast<void>(communicator_->api().mem_free(data()));
  else
    static_cast<void>(cudaFree(data()));
}

void DeviceBytes::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  ready_.record(native(producer_));
  ready_.make_wait(stream_.get());
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()), "copying");
  stream_.synchronize();
}

void DeviceBytes::zero(void* data, std::size_t bytes) {
  if (bytes > 0) check_cuda(cudaMemsetAsync(data, 0, bytes, native(producer_)), "zeroing memory");
}

}  // namespace lockstep::comm
