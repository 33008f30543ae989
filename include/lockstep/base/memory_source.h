// Where allocators get their memory from.
#pragma once

#include <cstddef>
#include <memory>

#include "lockstep/base/device.h"

namespace lockstep {

/// Memory of the host or of a device, in large pieces, all of which it outlives. Called rarely; must be thread-safe.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// At least 64-byte aligned, not initialised. Throws OutOfMemoryError where there is not as much, DeviceError or
  /// CudaError for all else; each says how much was asked.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  /// The same where the first `used` of them are all that is written for now.
  virtual std::byte* allocate_in_part(std::size_t bytes, std::size_t used) {
    static_cast<void>(used);
    return allocate(bytes);
  }
  /// A piece of this source, with the `bytes` that were asked for.
  virtual void free(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Blocks until the device has finished its copies from the pieces; they may then be written again.
  virtual void wait_until_read() {}
  /// The means to use the device here (a stream) ends: pieces in use are later freed without it.
  virtual void outlive_device() noexcept {}
  /// Whose memory it is.
  virtual Device device() const { return {}; }
};

/// Host memory; large blocks ask for huge pages, for what is used of them.
std::unique_ptr<MemorySource> make_host_memory();

}  // namespace lockstep
