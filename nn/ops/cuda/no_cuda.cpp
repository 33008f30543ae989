// In place of nn/ops/cuda where the build has no CUDA.
#include "lockstep/base/device.h"
#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cuda/transfer.h"

namespace lockstep::nn {

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) {
  throw DeviceError(probe_cuda().problem, probe_cuda().remedy);
}

void cuda::copy_between(Backend&, const Tensor&, Backend&, const Tensor&) {
  throw DeviceError(probe_cuda().problem, probe_cuda().remedy);
}

}  // namespace lockstep::nn
