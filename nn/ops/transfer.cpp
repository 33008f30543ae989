#include "lockstep/nn/ops/transfer.h"

#include "base/error.h"
#include "nn/ops/cuda/transfer.h"

namespace lockstep::nn {

Tensor to_device(Backend& target, const Tensor& tensor, Backend& source) {
  check_usage(tensor.defined() || tensor.count() == 0, "a tensor that holds nothing is to be moved",
              "give it one that does: Tensor::defined()");
  if (&target == &source) return tensor;
  Tensor made = target.empty(tensor.shape(), tensor.dtype());
  copy_to(target, made, tensor, source);
  return made;
}

void copy_to(Backend& target, const Tensor& to, const Tensor& from, Backend& source) {
  if (from.bytes() != to.bytes())
    throw UsageError(fmt::format("{} {} is to be copied into {} {}", name_of(from.dtype()), to_string(from.shape()),
                                 name_of(to.dtype()), to_string(to.shape())),
                     "give a place of the same shape and type");
  if (from.bytes() == 0) return;
  check_usage(from.defined() && to.defined(), "a copy from or to a tensor that holds nothing",
              "ask Tensor::defined() before");
  const auto has_values = [](const Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.raw_rows()) < kShapesAlone;
  };
  check_usage(has_values(from) || !has_values(to), "a tensor of shapes alone is to be copied to where there are values",
              "compute on the backend of the tape: a model is run so to estimate its memory, or to export it");
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
    throw UsageError(fmt::format("{} values for a tensor of {}", values.size(), to_string(shape)),
                     "give as many values as the shape has elements");
  target.upload(std::as_bytes(values), made);
  return made;
}

std::vector<float> values_of(Backend& source, const Tensor& tensor) {
  if (tensor.defined() && tensor.dtype() == DType::kBF16) {
    const Tensor wide = source.empty(tensor.shape());
    source.pointwise().cast(tensor, wide);
    return values_of(source, wide);
  }
  if (tensor.dtype() != DType::kF32)
    throw UsageError(fmt::format("values of a tensor of {} as f32", name_of(tensor.dtype())),
                     "read other types with Backend::download()");
  check_usage(tensor.defined() || tensor.count() == 0, "values of a tensor that holds nothing",
              "ask Tensor::defined() before; gradients are there after backward, and only where some has flowed");
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  source.download(tensor, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace lockstep::nn
