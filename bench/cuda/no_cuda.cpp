#include "base/error.h"
#include "bench/rivals/rivals.h"
#include "bench/timeline.h"

namespace lockstep::bench {

std::unique_ptr<DeviceTimer> make_device_timer(nn::Backend&, comm::ProcessGroup&) {
  throw DeviceError("this build computes on the CPU only", "build it with the CUDA Toolkit");
}

std::unique_ptr<Rival> make_nccl_rival(const comm::World&, comm::ProcessGroup&, std::string& missing) {
  missing = "this build computes on the CPU only";
  return nullptr;
}

}  // namespace lockstep::bench
