// Whether this process can compute on GPUs.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

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
