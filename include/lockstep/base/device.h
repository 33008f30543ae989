// Which device, and in which order work runs on it.
#pragma once

#include <string>

namespace lockstep {

enum class DeviceKind { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;  // among the devices that this process may see
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:1".
inline std::string to_string(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

/// A view of an in-order queue of device work, whose owner keeps it for as long as anybody has a view. On the CPU there
/// is none: work runs on the calling thread.
struct StreamView {
  void* native = nullptr;  // cudaStream_t on CUDA devices
};

}  // namespace lockstep
