#include "nn/ops/cuda/host_copies.h"

#include <algorithm>

#include "base/cuda/runtime.h"
#include "base/error.h"

namespace lockstep::nn::cuda {

void copy_to_device(Context& context, std::span<const std::byte> from, const Tensor& to) {
  LOCKSTEP_ASSERT(from.size() <= to.bytes(), "{} bytes into {}", from.size(), to.bytes());
  if (from.empty()) return;
  const cudaStream_t stream = native(context.stream);
  check_cuda(cudaMemcpyAsync(to.raw(), from.data(), from.size(), cudaMemcpyHostToDevice, stream), "uploading");
  check_cuda(cudaStreamSynchronize(stream), "uploading");
}

void copy_to_host(Context& context, const Tensor& from, std::span<std::byte> to) {
  LOCKSTEP_ASSERT(to.size() <= from.bytes(), "{} bytes of {}", to.size(), from.bytes());
  if (to.empty()) return;
  const cudaStream_t stream = native(context.stream);
  check_cuda(cudaMemcpyAsync(to.data(), from.raw(), to.size(), cudaMemcpyDeviceToHost, stream), "downloading");
  check_cuda(cudaStreamSynchronize(stream), "downloading");
}

void append_bytes(Context& context, const Tensor& from, std::vector<std::byte>& to) {
  const std::size_t before = to.size();
  to.resize(before + from.bytes());
  copy_to_host(context, from, std::span(to).subspan(before));
}

template <class Half>
void upload_rounded(Context& context, std::span<const float> values, const Tensor& to) {
  std::vector<Half> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), Half::from_float);
  copy_to_device(context, std::as_bytes(std::span(rounded)), to);
}

Tensor upload_as(Context& context, std::span<const float> values, DType dtype) {
  const Tensor made = Tensor::empty(context.allocator, {static_cast<std::int64_t>(values.size())}, dtype);
  if (dtype == DType::kBF16) {
    upload_rounded<BFloat16>(context, values, made);
  } else if (dtype == DType::kF16) {
    upload_rounded<Float16>(context, values, made);
  } else {
    LOCKSTEP_ASSERT(dtype == DType::kF32, "floats as {}", name_of(dtype));
    copy_to_device(context, std::as_bytes(values), made);
  }
  return made;
}

}  // namespace lockstep::nn::cuda
