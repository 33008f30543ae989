// NCCL as a backend, which a build without CUDA has too, to say so.
#include "comm/backends.h"
#include "comm/nccl/nccl_group.h"
#include "lockstep/base/device.h"

namespace lockstep::comm {

const BackendFamily& nccl_backend() {
  static const BackendFamily family{
      .name = "nccl",
      .title = "NCCL",
      .about = "NCCL among GPUs",
      .memory = DeviceKind::kCuda,
      .is_built = [] { return probe_cuda().built; },
      .library_version = nccl_library_version,
      .make_on_device = [](ProcessGroup& control,
                           const DeviceGroupOptions& options) { return make_nccl_group(control, options); },
  };
  return family;
}

}  // namespace lockstep::comm
