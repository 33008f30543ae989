// Memory of the soft device, pinned memory and copies.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "streams.h"

// Device memory is host memory whose bounds are known. New memory is full of ones, which is a NaN in every type of
// float and -1 in every integer; what lies before and after it must stay as it is.

namespace lockstep::soft_cuda {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kMargin = 512;
constexpr int kMarginByte = 0xa5;

enum class Kind { kDevice, kPinned, kRegistered };

struct Range {
  Kind kind = Kind::kDevice;
  int device = 0;
  std::size_t bytes = 0;
  cudaMemPool_t pool = nullptr;
  std::byte* whole = nullptr;  // with its margins
  std::size_t whole_bytes = 0;
};

struct Pool {
  int device = 0;
  std::uint64_t release_threshold = 0;
  std::uint64_t used = 0, used_high = 0;
};

std::map<const std::byte*, Range> ranges;
std::vector<std::size_t> used_bytes;
std::unordered_map<const void*, std::unique_ptr<Pool>> pools;
std::map<int, cudaMemPool_t> default_pools;

using Guard = std::lock_guard<std::recursive_mutex>;

const std::byte* bytes_of(const void* p) { return static_cast<const std::byte*>(p); }

// The range that `p` lies in; end() for the host's own memory.
auto range_of(const void* p) {
  auto at = ranges.upper_bound(bytes_of(p));
  if (at == ranges.begin()) return ranges.end();
  --at;
  return bytes_of(p) < at->first + at->second.bytes ? at : ranges.end();
}

bool is_device(const void* p, std::size_t bytes, int* device = nullptr) {
  const auto at = range_of(p);
  if (at == ranges.end() || at->second.kind != Kind::kDevice) return false;
  if (device != nullptr) *device = at->second.device;
  return bytes <= static_cast<std::size_t>(at->first + at->second.bytes - bytes_of(p));
}

// Host memory that is pinned must hold all of it.
bool is_host(const void* p, std::size_t bytes) {
  const auto at = range_of(p);
  if (at == ranges.end()) return p != nullptr;
  return at->second.kind != Kind::kDevice &&
         bytes <= static_cast<std::size_t>(at->first + at->second.bytes - bytes_of(p));
}

bool is_pinned(const void* p) { return range_of(p) != ranges.end(); }

std::byte* make_range(Kind kind, std::size_t bytes, cudaMemPool_t pool) {
  const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t alignment = kind == Kind::kDevice ? kAlignment : 4096;
  const std::size_t front = std::max(kMargin, alignment);
  const std::size_t all = (front + rounded + kMargin + alignment - 1) / alignment * alignment;
  auto* const whole = static_cast<std::byte*>(std::aligned_alloc(alignment, all));
  if (whole == nullptr) return nullptr;
  std::memset(whole, kMarginByte, all);
  std::memset(whole + front, kUnwrittenByte, bytes);
  ranges.emplace(whole + front, Range{kind, current_device(), bytes, pool, whole, all});
  return whole + front;
}

void check_margins(const std::byte* data, const Range& range) {
  const auto untouched = [](const std::byte* p, std::size_t n) {
    return std::all_of(p, p + n, [](std::byte b) { return b == std::byte{kMarginByte}; });
  };
  if (untouched(range.whole, static_cast<std::size_t>(data - range.whole)) && untouched(data + range.bytes, kMargin))
    return;
  std::fprintf(stderr, "soft CUDA: somebody wrote beside an allocation of %zu bytes\n", range.bytes);
  std::abort();
}

// Its memory, which is the caller's to free.
std::byte* forget_range(std::map<const std::byte*, Range>::iterator at) {
  check_margins(at->first, at->second);
  if (at->second.kind == Kind::kDevice) used_bytes[static_cast<std::size_t>(at->second.device)] -= at->second.bytes;
  if (at->second.pool != nullptr)
    if (const auto pool = pools.find(at->second.pool); pool != pools.end()) pool->second->used -= at->second.bytes;
  std::byte* const whole = at->second.whole;
  ranges.erase(at);
  return whole;
}

cudaError_t allocate(void** out, std::size_t bytes, cudaMemPool_t pool) {
  use_device();
  const Guard guard(machine_mutex());
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  const auto device = static_cast<std::size_t>(current_device());
  if (used_bytes.size() <= device) used_bytes.resize(device + 1);
  if (bytes > machine().memory_bytes || used_bytes[device] > machine().memory_bytes - bytes)
    return noted(cudaErrorMemoryAllocation);
  *out = make_range(Kind::kDevice, bytes, pool);
  if (*out == nullptr) return noted(cudaErrorMemoryAllocation);
  used_bytes[device] += bytes;
  if (pool != nullptr) {
    Pool& from = *pools.at(pool);
    from.used += bytes;
    from.used_high = std::max(from.used_high, from.used);
  }
  return cudaSuccess;
}

cudaMemPool_t add_pool(int device) {
  auto made = std::make_unique<Pool>();
  made->device = device;
  const auto handle = reinterpret_cast<cudaMemPool_t>(made.get());
  pools.emplace(handle, std::move(made));
  return handle;
}

cudaMemPool_t default_pool(int device) {
  auto& pool = default_pools[device];
  if (pool == nullptr) pool = add_pool(device);
  return pool;
}

// What a copy is, or kInvalid where the pointers are not what `kind` says.
enum class CopyDirection { kInvalid, kUpload, kDownload, kOnDevice, kOnHost };

CopyDirection direction_of(const void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = is_device(to, bytes), from_device = is_device(from, bytes);
  const bool to_host = is_host(to, bytes), from_host = is_host(from, bytes);
  const bool any = kind == cudaMemcpyDefault;
  if (to_device && from_host && (any || kind == cudaMemcpyHostToDevice)) return CopyDirection::kUpload;
  if (to_host && from_device && (any || kind == cudaMemcpyDeviceToHost)) return CopyDirection::kDownload;
  if (to_device && from_device && (any || kind == cudaMemcpyDeviceToDevice)) return CopyDirection::kOnDevice;
  if (to_host && from_host && (any || kind == cudaMemcpyHostToHost)) return CopyDirection::kOnHost;
  return CopyDirection::kInvalid;
}

// Checks again, because a lazy stream gets to it later.
void copy_now(void* to, const void* from, std::size_t bytes, bool to_pinned, bool from_pinned) {
  {
    const Guard guard(machine_mutex());
    if ((to_pinned && !is_pinned(to)) || (from_pinned && !is_pinned(from)))
      throw KernelFault("a copy whose memory was freed before it ran");
  }
  count_copy();
  std::memmove(to, from, bytes);
}

cudaError_t copy_in(cudaStream_t stream, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return cudaSuccess;
  bool to_pinned = false, from_pinned = false;
  CopyDirection direction = CopyDirection::kInvalid;
  {
    const Guard guard(machine_mutex());
    direction = direction_of(to, from, bytes, kind);
    to_pinned = is_pinned(to);
    from_pinned = is_pinned(from);
  }
  if (direction == CopyDirection::kInvalid) return noted(cudaErrorInvalidValue);
  if (!to_pinned || !from_pinned)
    if (is_capturing(stream)) return noted(cudaErrorStreamCaptureUnsupported);
  if (direction == CopyDirection::kUpload && !from_pinned) {  // pageable memory is taken before the call returns
    const auto kept = std::make_shared<std::vector<std::byte>>(bytes_of(from), bytes_of(from) + bytes);
    return submit_copy(stream, [=] { copy_now(to, kept->data(), bytes, true, false); });
  }
  const cudaError_t status = submit_copy(stream, [=] { copy_now(to, from, bytes, to_pinned, from_pinned); });
  if (status == cudaSuccess && (direction == CopyDirection::kDownload || direction == CopyDirection::kOnHost) &&
      !to_pinned)
    return finish(stream);
  return status;
}

// `height` rows of `width` bytes that begin `pitch` apart.
cudaError_t set_rows_in(cudaStream_t stream, void* data, std::size_t pitch, int value, std::size_t width,
                        std::size_t height) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > pitch) return noted(cudaErrorInvalidPitchValue);
  const std::size_t bytes = (height - 1) * pitch + width;
  {
    const Guard guard(machine_mutex());
    if (!is_device(data, bytes)) return noted(cudaErrorInvalidValue);
  }
  return submit(stream, [=] {
    {
      const Guard guard(machine_mutex());
      if (!is_device(data, bytes)) throw KernelFault("a memset of memory that was freed before it ran");
    }
    for (std::size_t row = 0; row < height; ++row)
      std::memset(static_cast<std::byte*>(data) + row * pitch, value, width);
  });
}

cudaError_t set_in(cudaStream_t stream, void* data, int value, std::size_t bytes) {
  return set_rows_in(stream, data, bytes, value, bytes, 1);
}

cudaError_t free_now(void* data) {
  const Guard guard(machine_mutex());
  const auto at = ranges.find(bytes_of(data));
  if (at == ranges.end() || at->second.kind != Kind::kDevice) return noted(cudaErrorInvalidValue);
  std::free(forget_range(at));
  return cudaSuccess;
}

}  // namespace

std::optional<Extent> extent_of(const void* at) {
  const Guard guard(machine_mutex());
  auto found = ranges.upper_bound(bytes_of(at));
  // Before the first byte of the next one, or after the last one of the one before.
  if (found != ranges.end() && found->second.whole != nullptr && bytes_of(at) >= found->second.whole)
    return Extent{reinterpret_cast<std::uintptr_t>(found->first), found->second.bytes};
  if (found == ranges.begin()) return std::nullopt;
  --found;
  const Range& range = found->second;
  const std::byte* const end = range.whole != nullptr ? range.whole + range.whole_bytes : found->first + range.bytes;
  if (bytes_of(at) >= end) return std::nullopt;
  return Extent{reinterpret_cast<std::uintptr_t>(found->first), range.bytes};
}

void unmap(void* data) {
  const Guard guard(machine_mutex());
  const auto at = ranges.find(bytes_of(data));
  if (at == ranges.end() || at->second.kind != Kind::kDevice) throw KernelFault("unmapping what is no device memory");
  const std::size_t bytes = at->second.whole_bytes;
  std::byte* const whole = forget_range(at);
  // Kernels and copies are refused by their address; what goes past them, such as a collective, faults.
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = (reinterpret_cast<std::uintptr_t>(whole) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(whole) + bytes) / page * page;
  if (first < end) mprotect(reinterpret_cast<void*>(first), end - first, PROT_NONE);
}

void count_memory(Counts& counts) {
  const Guard guard(machine_mutex());
  for (const auto& [data, range] : ranges) ++(range.kind == Kind::kDevice ? counts.allocations : counts.pinned);
}

}  // namespace lockstep::soft_cuda

using namespace lockstep::soft_cuda;

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  return allocate(data, bytes, nullptr);
}

cudaError_t cudaFree(void* data) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  if (data == nullptr) return cudaSuccess;
  int device = -1;
  {
    const Guard guard(machine_mutex());
    if (!is_device(data, 0, &device)) return noted(cudaErrorInvalidValue);
  }
  finish_device(device);
  return free_now(data);
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  const Guard guard(machine_mutex());
  const auto found = pools.find(pool);
  if (found == pools.end() || found->second->device != current_device()) return noted(cudaErrorInvalidValue);
  if (device_of(stream) != current_device()) return noted(cudaErrorInvalidResourceHandle);
  return allocate(data, bytes, pool);
}

cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  const Guard guard(machine_mutex());
  return cudaMallocFromPoolAsync(data, bytes, default_pool(current_device()), stream);
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  if (data == nullptr) return cudaSuccess;
  {
    const Guard guard(machine_mutex());
    const auto at = ranges.find(bytes_of(data));
    if (at == ranges.end() || at->second.kind != Kind::kDevice) return noted(cudaErrorInvalidValue);
  }
  return submit_copy(stream, [=] { free_now(data); });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  const Guard guard(machine_mutex());
  if (properties->allocType != cudaMemAllocationTypePinned || properties->location.type != cudaMemLocationTypeDevice ||
      properties->location.id < 0 || properties->location.id >= machine().devices)
    return noted(cudaErrorInvalidValue);
  *pool = add_pool(properties->location.id);
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  const Guard guard(machine_mutex());
  return pools.erase(pool) == 1 ? cudaSuccess : noted(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  const Guard guard(machine_mutex());
  if (device < 0 || device >= machine().devices) return noted(cudaErrorInvalidDevice);
  *pool = default_pool(device);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const Guard guard(machine_mutex());
  const auto found = pools.find(pool);
  if (found == pools.end()) return noted(cudaErrorInvalidValue);
  if (attribute == cudaMemPoolAttrReleaseThreshold)
    found->second->release_threshold = *static_cast<std::uint64_t*>(value);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const Guard guard(machine_mutex());
  const auto found = pools.find(pool);
  if (found == pools.end()) return noted(cudaErrorInvalidValue);
  const Pool& from = *found->second;
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold: *static_cast<std::uint64_t*>(value) = from.release_threshold; break;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: *static_cast<std::uint64_t*>(value) = from.used; break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh: *static_cast<std::uint64_t*>(value) = from.used_high; break;
    default: *static_cast<int*>(value) = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  const Guard guard(machine_mutex());
  return pools.count(pool) == 1 ? cudaSuccess : noted(cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*, std::size_t) {
  return cudaMemPoolTrimTo(pool, 0);
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  use_device();
  const Guard guard(machine_mutex());
  const auto device = static_cast<std::size_t>(current_device());
  const std::size_t used = device < used_bytes.size() ? used_bytes[device] : 0;
  *total = machine().memory_bytes;
  *free = *total > used ? *total - used : 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  use_device();
  const Guard guard(machine_mutex());
  *data = bytes == 0 ? nullptr : make_range(Kind::kPinned, bytes, nullptr);
  return bytes > 0 && *data == nullptr ? noted(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, std::size_t bytes) { return cudaHostAlloc(data, bytes, 0); }

cudaError_t cudaFreeHost(void* data) {
  use_device();
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  const Guard guard(machine_mutex());
  if (data == nullptr) return cudaSuccess;
  const auto at = ranges.find(bytes_of(data));
  if (at == ranges.end() || at->second.kind != Kind::kPinned) return noted(cudaErrorInvalidValue);
  std::free(forget_range(at));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  const Guard guard(machine_mutex());
  if (data == nullptr || bytes == 0) return noted(cudaErrorInvalidValue);
  if (is_pinned(data)) return noted(cudaErrorHostMemoryAlreadyRegistered);
  ranges.emplace(bytes_of(data), Range{Kind::kRegistered, current_device(), bytes, nullptr, nullptr, 0});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  const Guard guard(machine_mutex());
  const auto at = ranges.find(bytes_of(data));
  if (at == ranges.end() || at->second.kind != Kind::kRegistered) return noted(cudaErrorHostMemoryNotRegistered);
  ranges.erase(at);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Guard guard(machine_mutex());
  *attributes = {};
  const auto at = range_of(data);
  if (at == ranges.end()) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  const bool device = at->second.kind == Kind::kDevice;
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = at->second.device;
  attributes->devicePointer = const_cast<void*>(data);
  attributes->hostPointer = device ? nullptr : const_cast<void*>(data);
  return cudaSuccess;
}

// Goes through the default stream, and so does not wait for others.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  const cudaError_t status = copy_in(nullptr, to, from, bytes, kind);
  return status == cudaSuccess ? finish(nullptr) : status;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_in(stream, to, from, bytes, kind);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  {
    const Guard guard(machine_mutex());
    int at_to = -1, at_from = -1;
    if (!is_device(to, bytes, &at_to) || !is_device(from, bytes, &at_from) || at_to != to_device ||
        at_from != from_device)
      return noted(cudaErrorInvalidValue);
  }
  return copy_in(stream, to, from, bytes, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, std::size_t bytes) {
  const cudaError_t status = cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr);
  return status == cudaSuccess ? finish(nullptr) : status;
}

cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  if (const cudaError_t status = refuse_while_capturing(); status != cudaSuccess) return status;
  const cudaError_t status = set_in(nullptr, data, value, bytes);
  return status == cudaSuccess ? finish(nullptr) : status;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return set_in(stream, data, value, bytes);
}

cudaError_t cudaMemset2DAsync(void* data, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  return set_rows_in(stream, data, pitch, value, width, height);
}
