// How much memory this process uses, how much more it may, and where allocators get theirs from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/device.h"

namespace lockstep {

/// The most bytes that this process has had resident so far.
std::int64_t peak_resident_bytes();

/// What some processes, this one among them, may still take together before the kernel ends one of them.
struct MemoryBound {
  std::string id;    // the same for processes that share it, on whatever host
  std::string name;  // for people: "the machine", "the control group /job (memory.max 2.0 GiB)"
  std::uint64_t free_bytes = 0;
};

/// The machine's available memory, swap included, and what the limits of this process' control groups leave: versions 1
/// and 2, all ancestors included. Files in the page cache count as free. Empty where the kernel does not say. `root`:
/// where /proc and the groups' file systems are found, for tests.
std::vector<MemoryBound> memory_bounds(const std::string& root = "");

/// Memory of the host or of a device, in large pieces. Called rarely; must be thread-safe.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// At least 64-byte aligned. Throws OutOfMemoryError where there is not as much, DeviceError or CudaError for all
  /// else; each says how much was asked.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void free(std::byte* data, std::size_t bytes) noexcept = 0;
  /// What makes the device usable here (a stream) ends: pieces that are still given are freed without it later.
  virtual void outlive_device() noexcept {}
  /// Whose memory it is.
  virtual Device device() const { return {}; }
};

/// Host memory; large blocks ask for huge pages.
std::unique_ptr<MemorySource> make_host_memory();

}  // namespace lockstep
