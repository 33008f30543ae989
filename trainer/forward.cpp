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

nn::Tensor on_device(nn::Backend& backend, const data::Array& array, const data::Dataset::Input& input,
                     std::int64_t samples) {
  const nn::Shape shape = batch_shape(input.dims, samples);
  return input.integers ? backend.from_host(array.integers.data(), shape, DType::kI32)
                        : backend.from_host(array.numbers.data(), shape, DType::kF32);
}

nn::Tensor rounded(nn::Backend& backend, nn::Tensor numbers, DType activations) {
  if (!numbers.defined() || numbers.dtype() != DType::kF32 || activations == DType::kF32) return numbers;
  nn::Tensor made = backend.empty(numbers.shape(), activations);
  backend.pointwise().cast(numbers, made);
  return made;
}

// A loss compares numbers with such as they are.
nn::Vars comparable(nn::Tape& tape, const nn::Vars& outputs, const nn::Tensor& targets) {
  if (targets.dtype() != DType::kF32) return outputs;
  nn::Vars all;
  for (const nn::Var output : outputs)
    all.push_back(output.dtype() == DType::kBF16 ? nn::to_f32(tape, output) : output);
  return all;
}

}  // namespace

nn::Vars Inputs::on(nn::Tape& tape) const {
  nn::Vars all = tape.input(x);
  for (const nn::Tensor& one : further) all.push_back(tape.input(one));
  return all;
}

SampleFormat format_of(const data::Dataset& dataset) {
  return {.dims = dataset.sample_dims(),
          .tokens = dataset.has_tokens(),
          .target_dims = dataset.target_dims(),
          .numeric_targets = dataset.has_numeric_targets(),
          .targets = static_cast<std::int64_t>(dataset.targets_per_sample()),
          .further = dataset.further_inputs()};
}

Inputs inputs_of(nn::Backend& backend, const data::Batch& batch, const SampleFormat& format) {
  const auto samples = static_cast<std::int64_t>(batch.count);
  const nn::Shape shape = batch_shape(format.dims, samples), targets = batch_shape(format.target_dims, samples);
  Inputs inputs = {.x = format.tokens ? backend.from_host(batch.tokens.data(), shape, DType::kI32)
                                      : backend.from_host(batch.x.data(), shape, DType::kF32),
                   .targets = format.numeric_targets ? backend.from_host(batch.targets.data(), targets, DType::kF32)
                                                     : backend.from_host(batch.labels.data(), targets, DType::kI32)};
  for (std::size_t i = 0; i < format.further.size(); ++i)
    inputs.further.push_back(on_device(backend, batch.further[i], format.further[i], samples));
  return inputs;
}

Inputs no_inputs(nn::Backend& backend, const SampleFormat& format, DType activations) {
  const nn::Shape shape = batch_shape(format.dims, 0);
  Inputs inputs = {
      .x = backend.empty(shape, format.tokens ? DType::kI32 : activations),
      .targets = backend.empty(batch_shape(format.target_dims, 0), format.numeric_targets ? DType::kF32 : DType::kI32)};
  for (const auto& input : format.further)
    inputs.further.push_back(backend.empty(batch_shape(input.dims, 0), input.integers ? DType::kI32 : activations));
  return inputs;
}

Inputs with_activations(nn::Backend& backend, Inputs inputs, DType activations) {
  inputs.x = rounded(backend, std::move(inputs.x), activations);
  for (nn::Tensor& one : inputs.further) one = rounded(backend, std::move(one), activations);
  return inputs;
}

nn::Loss loss_of(nn::Tape& tape, const nn::Vars& outputs, const Inputs& inputs, const nn::LossFunction& loss,
                 float scale) {
  return loss(tape, comparable(tape, outputs, inputs.targets), inputs.targets, scale);
}

nn::Loss forward(nn::Tape& tape, nn::Module& module, const Inputs& inputs, const nn::LossFunction& loss, float scale) {
  return module.forward_loss(
      tape, inputs.on(tape), inputs.targets,
      [&loss](nn::Tape& on, const nn::Vars& outputs, const nn::Tensor& targets, float part) {
        return loss(on, comparable(on, outputs, targets), targets, part);
      },
      scale);
}

}  // namespace lockstep::trainer
