#include "trainer/forward.h"

#include <algorithm>
#include <array>
#include <utility>

namespace lockstep::trainer {
namespace {

/// (samples, sample dims…)
nn::Shape batch_shape(const std::vector<std::int64_t>& sample_dims, std::int64_t samples) {
  std::array<std::int64_t, nn::Shape::kMaxDims> dims = {samples};
  LOCKSTEP_ASSERT(sample_dims.size() < dims.size(), "samples of {} dimensions", sample_dims.size());
  std::ranges::copy(sample_dims, dims.begin() + 1);
  return nn::Shape(std::span<const std::int64_t>(dims.data(), sample_dims.size() + 1));
}

}  // namespace

nn::Loss forward(nn::Backend& backend, nn::Tape& tape, nn::Module& module, const data::Batch& batch,
                 const std::vector<std::int64_t>& sample_dims, float scale, DType activations) {
  const auto samples = static_cast<std::int64_t>(batch.labels.size());
  nn::Tensor x = backend.from_host(batch.x.data(), batch_shape(sample_dims, samples), DType::kF32);
  if (activations != x.dtype()) {
    const nn::Tensor rounded = backend.empty(x.shape(), activations);
    backend.pointwise().cast(x, rounded);
    x = rounded;
  }
  const auto labels = backend.from_host(batch.labels.data(), {samples}, DType::kI32);
  return nn::cross_entropy(tape, module.forward(tape, tape.input(std::move(x))), labels, scale);
}

}  // namespace lockstep::trainer
