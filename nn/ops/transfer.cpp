#include "nn/ops/transfer.h"

#include "nn/ops/cuda/transfer.h"

namespace lockstep::nn {

Tensor to_device(Backend& target, const Tensor& tensor, Backend& source) {
  LOCKSTEP_ASSERT(tensor.defined(), "no tensor to move");
  if (&target == &source) return tensor;
  Tensor made = target.empty(tensor.shape(), tensor.dtype());
  const auto host_bytes = [](const Tensor& on_cpu) {
    return std::span(static_cast<std::byte*>(on_cpu.raw()), on_cpu.bytes());
  };
  if (source.device().kind == DeviceKind::kCpu)
    target.upload(host_bytes(tensor), made);
  else if (target.device().kind == DeviceKind::kCpu)
    source.download(tensor, host_bytes(made));
  else
    cuda::copy_between(source, tensor, target, made);
  return made;
}

}  // namespace lockstep::nn
