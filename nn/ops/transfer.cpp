#include "nn/ops/transfer.h"

#include "nn/ops/cuda/transfer.h"

namespace lockstep::nn {

Tensor to_device(Backend& target, const Tensor& tensor, Backend& source) {
  LOCKSTEP_ASSERT(tensor.defined(), "no tensor to move");
  if (&target == &source) return tensor;
  Tensor made = target.empty(tensor.shape(), tensor.dtype());
  copy_to(target, made, tensor, source);
  return made;
}

void copy_to(Backend& target, const Tensor& to, const Tensor& from, Backend& source) {
  LOCKSTEP_ASSERT(from.bytes() == to.bytes(), "{} bytes into {}", from.bytes(), to.bytes());
  if (from.bytes() == 0) return;
  const auto host_bytes = [](const Tensor& on_cpu) {
    return std::span(static_cast<std::byte*>(on_cpu.raw()), on_cpu.bytes());
  };
  if (&target == &source)
    target.pointwise().copy(from, to);
  else if (source.device().kind == DeviceKind::kCpu)
    target.upload(host_bytes(from), to);
  else if (target.device().kind == DeviceKind::kCpu)
    source.download(from, host_bytes(to));
  else
    cuda::copy_between(source, from, target, to);
}

Tensor tensor_of(Backend& target, const Shape& shape, std::span<const float> values) {
  Tensor made = target.empty(shape);
  if (values.size() != static_cast<std::size_t>(made.count()))
    throw UsageError(fmt::format("{} values for a tensor of {}", values.size(), to_string(shape)));
  target.upload(std::as_bytes(values), made);
  return made;
}

std::vector<float> values_of(Backend& source, const Tensor& tensor) {
  LOCKSTEP_ASSERT(tensor.dtype() == DType::kF32, "values of {}", name_of(tensor.dtype()));
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  source.download(tensor, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace lockstep::nn
