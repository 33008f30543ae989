// In place of the rest where the build has no CUDA.
#include "base/error.h"
#include "comm/nccl/nccl_group.h"
#include "lockstep/base/device.h"

namespace lockstep::comm {

std::unique_ptr<DeviceGroup> make_nccl_group(ProcessGroup&, const DeviceGroupOptions&, const NcclApi*) {
  throw DeviceError(probe_cuda().problem, probe_cuda().remedy);
}

std::unique_ptr<DeviceGroup> make_device_self_group(const DeviceGroupOptions&) {
  throw DeviceError(probe_cuda().problem, probe_cuda().remedy);
}

std::string nccl_library_version() { return "none"; }

}  // namespace lockstep::comm
