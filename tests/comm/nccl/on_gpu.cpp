#include "tests/comm/nccl/on_gpu.h"

#include "lockstep/base/device.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

int device_of(int rank) { return rank % probe_cuda().devices; }

}  // namespace

const CudaStream& producer_on_gpu() {
  static const auto* const stream = [] {
    check_cuda(cudaSetDevice(device_of(testing::world().rank)), "choosing a GPU");
    return new CudaStream;
  }();
  return *stream;
}

std::unique_ptr<DeviceGroup> make_group_on_gpu(ProcessGroup& control, Clock::duration timeout) {
  return make_nccl_group(
      control, {.device = device_of(control.rank()), .producer = producer_on_gpu().view(), .timeout = timeout});
}

}  // namespace lockstep::comm
