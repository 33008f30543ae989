// The machine: its driver, its devices, and what calls have failed with.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <string_view>
#include <utility>

#include "block.h"
#include "streams.h"

namespace lockstep::soft_cuda {
namespace {

bool has_drawn = false;

// SplitMix64: any seed will do.
struct Random {
  std::uint64_t state = 0;
  std::uint64_t next() {
    has_drawn = true;
    std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
};

Machine the_machine;
Random for_grids{the_machine.seed}, for_graphs{~the_machine.seed};
thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::set<int> used_devices;
std::set<std::pair<int, const void*>> loaded;  // kernels

cudaError_t startup_status() {
  if (the_machine.driver_version < CUDART_VERSION / 1000 * 1000) return cudaErrorInsufficientDriver;
  if (!the_machine.sees_devices || the_machine.devices == 0) return cudaErrorNoDevice;
  return cudaSuccess;
}

cudaError_t check_device(int device) {
  if (const cudaError_t status = startup_status(); status != cudaSuccess) return noted(status);
  return device >= 0 && device < the_machine.devices ? cudaSuccess : noted(cudaErrorInvalidDevice);
}

}  // namespace

Streams streams_by_default() {
  const char* const given = std::getenv("LOCKSTEP_SOFT_STREAMS");
  const std::string_view streams = given != nullptr ? given : "";
  return streams == "lazy" ? Streams::kLazy : streams == "late" ? Streams::kLate : Streams::kEager;
}

bool lazy_loading_by_default() {
  const char* const given = std::getenv("LOCKSTEP_SOFT_LOADING");
  return given != nullptr && std::strcmp(given, "lazy") == 0;
}

int devices_by_default() {
  const char* const given = std::getenv("LOCKSTEP_TEST_GPUS");
  return given != nullptr ? std::atoi(given) : 2;
}

std::uint64_t seed_by_default() {
  static const std::uint64_t seed = [] {
    const char* const given = std::getenv("LOCKSTEP_SOFT_SEED");
    const std::uint64_t chosen = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    ::on_exit(
        [](int status, void*) {
          if (status != 0 && has_drawn)
            std::fprintf(stderr, "soft CUDA: LOCKSTEP_SOFT_SEED=%llu repeats its order of blocks, warps and nodes\n",
                         static_cast<unsigned long long>(the_machine.seed));
        },
        nullptr);
    return chosen;
  }();
  return seed;
}

const Machine& machine() { return the_machine; }

std::uint64_t random_for_grids() { return for_grids.next(); }
std::uint64_t random_for_graphs() { return for_graphs.next(); }

void set_machine(const Machine& machine) {
  const Counts left = counts();
  if (left.allocations + left.pinned + left.live_streams + left.live_events > 0)
    throw std::logic_error("the soft machine is still in use");
  forget_orders();
  const std::lock_guard lock(machine_mutex());
  the_machine = machine;
  for_grids.state = machine.seed;
  for_graphs.state = ~machine.seed;
  used_devices.clear();
  loaded.clear();
  device_of_thread = 0;
}

void set_memory_bytes(std::size_t bytes) {
  const std::lock_guard lock(machine_mutex());
  the_machine.memory_bytes = bytes;
}

void set_fused_attention(bool available) {
  const std::lock_guard lock(machine_mutex());
  the_machine.fused_attention = available;
}

void set_streams(Streams streams) {
  for (int device = 0; device < the_machine.devices; ++device) finish_device(device);
  const std::lock_guard lock(machine_mutex());
  the_machine.streams = streams;
}

Counts counts() {
  Counts counts;
  count_streams(counts);
  count_memory(counts);
  const std::lock_guard lock(machine_mutex());
  counts.contexts = used_devices.size();
  return counts;
}

void use_device() {
  const std::lock_guard lock(machine_mutex());
  used_devices.insert(device_of_thread);
}

void load_kernel(const void* function) {
  {
    const std::lock_guard lock(machine_mutex());
    if (!the_machine.lazy_loading || !loaded.emplace(device_of_thread, function).second) return;
  }
  count_loading(finish_device(device_of_thread));
}

int current_device() { return device_of_thread; }

cudaError_t noted(cudaError_t status) {
  last_error = status;
  return status;
}

}  // namespace lockstep::soft_cuda

using namespace lockstep::soft_cuda;

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t status = startup_status(); status != cudaSuccess) return noted(status);
  *count = machine().devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t status = check_device(device); status != cudaSuccess) return status;
  device_of_thread = device;
  use_device();
  return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return check_device(device); }

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t status = startup_status(); status != cudaSuccess) return noted(status);
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  count_wait();
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  finish_device(current_device());
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (const cudaError_t status = check_device(device); status != cudaSuccess) return status;
  return std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", 0x1b + device) < length
             ? cudaSuccess
             : noted(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t status = check_device(device); status != cudaSuccess) return status;
  *properties = {};
  std::strcpy(properties->name, "Soft GPU");
  properties->totalGlobalMem = machine().memory_bytes;
  properties->sharedMemPerBlock = 48 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->major = machine().compute_major;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->l2CacheSize = 50 << 20;
  properties->memoryPoolsSupported = 1;
  properties->pciBusID = 0x1b + device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t status = check_device(device); status != cudaSuccess) return status;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = machine().compute_major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrMemoryClockRate: *value = 2'619'000; break;  // an H100's
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrPciBusId: *value = 0x1b + device; break;
    default: return noted(cudaErrorNotSupported);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return machine().runs_kernels ? cudaSuccess : noted(cudaErrorNoKernelImageForDevice);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const cudaError_t status = check_device(std::max(device, peer)); status != cudaSuccess) return status;
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) { return check_device(peer); }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "unrecognized error code";
  }
}

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    default: return cudaGetErrorName(status);
  }
}
