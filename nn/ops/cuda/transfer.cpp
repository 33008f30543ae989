#include "nn/ops/cuda/transfer.h"

#include "nn/ops/cuda/backend.h"

namespace lockstep::nn::cuda {

void copy_between(Backend& source, const Tensor& from, Backend& target, const Tensor& to) {
  if (from.bytes() == 0) return;
  const int source_device = source.device().index, target_device = target.device().index;
  dynamic_cast<CudaBackend&>(source).memory().share_with(target_device);

  make_current(source_device);
  CudaEvent made;  // by the source
  made.record(native(source.stream()));

  make_current(target_device);
  const cudaStream_t stream = native(target.stream());
  made.make_wait(stream);
  const cudaError_t status =
      target_device == source_device  // two backends of one GPU
          ? cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(), cudaMemcpyDeviceToDevice, stream)
          : cudaMemcpyPeerAsync(to.raw(), target_device, from.raw(), source_device, from.bytes(), stream);
  check_cuda(status, "copying between GPUs");
  CudaEvent read;  // the source may overwrite `from` then
  read.record(stream);

  make_current(source_device);
  read.make_wait(native(source.stream()));
}

}  // namespace lockstep::nn::cuda
