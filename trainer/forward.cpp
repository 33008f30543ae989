#include "lockstep/trainer/forward.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

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

SampleFormat format_of(const data::Dataset& dataset) {
  return {.dims = dataset.sample_dims(),
          .tokens = dataset.has_tokens(),
          .target_dims = dataset.target_dims(),
          .numeric_targets = dataset.has_numeric_targets(),
          .targets = static_cast<std::int64_t>(dataset.targets_per_sample())};
}

Inputs inputs_of(nn::Backend& backend, const data::Batch& batch, const SampleFormat& format) {
  const auto samples = static_cast<std::int64_t>(batch.count);
  const nn::Shape shape = batch_shape(format.dims, samples), targets = batch_shape(format.target_dims, samples);
  return {.x = format.tokens ? backend.from_host(batch.tokens.data(), shape, DType::kI32)
                             : backend.from_host(batch.x.data(), shape, DType::kF32),
          .targets = format.numeric_targets ? backend.from_host(batch.targets.data(), targets, DType::kF32)
                                            : backend.from_host(batch.labels.data(), targets, DType::kI32)};
}

Inputs no_inputs(nn::Backend& backend, const SampleFormat& format, DType activations) {
  const nn::Shape shape = batch_shape(format.dims, 0);
  return {
      .x = backend.empty(shape, format.tokens ? DType::kI32 : activations),
      .targets = backend.empty(batch_shape(format.target_dims, 0), format.numeric_targets ? DType::kF32 : DType::kI32)};
}

Inputs with_activations(nn::Backend& backend, Inputs inputs, DType activations) {
  if (!inputs.x.defined() || inputs.x.dtype() != DType::kF32 || activations == DType::kF32) return inputs;
  nn::Tensor rounded = backend.empty(inputs.x.shape(), activations);
  backend.pointwise().cast(inputs.x, rounded);
  inputs.x = std::move(rounded);
  return inputs;
}

nn::Loss loss_of(nn::Tape& tape, nn::Var outputs, const Inputs& inputs, const nn::LossFunction& loss, float scale) {
  const bool numbers = inputs.targets.dtype() == DType::kF32;  // a loss compares them with such as they are
  return loss(tape, numbers ? nn::to_f32(tape, outputs) : outputs, inputs.targets, scale);
}

nn::Loss forward(nn::Tape& tape, nn::Module& module, const Inputs& inputs, const nn::LossFunction& loss, float scale) {
  return loss_of(tape, module.forward(tape, tape.input(inputs.x)), inputs, loss, scale);
}

}  // namespace lockstep::trainer
