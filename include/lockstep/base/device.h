// Which device, in which order work runs on it, where its memory comes from, and whether there are GPUs at all.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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

/// Whether this process can compute on GPUs.
struct CudaProbe {
  bool built = false;  // this build can use GPUs at all
  int devices = 0;     // that this process may see
  /// PCI addresses, "0000:1b:00.0", as in /sys/bus/pci/devices; empty where the driver does not report one.
  std::vector<std::string> bus_ids;
  std::string problem;  // why there are none: "no NVIDIA driver is loaded"; empty where there are
  std::string remedy;
  int runtime_version = 0;  // 13000 is CUDA 13.0; 0 where none was built in
  int driver_version = 0;   // the newest CUDA that the driver can run; 0: no driver
};

/// Asks the driver, once in a process. Makes no context, and never throws. What the environment says about devices
/// (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER) counts as it is at that moment. From any thread; the result stays until
/// the process ends.
const CudaProbe& probe_cuda();

}  // namespace lockstep
