#include "lockstep/trainer/forward.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::trainer {
namespace {

// (samples, dims of one…)
nn::Shape batch_shape(const std::vector<std::int64_t>& dims_of_one, std::int64_t samples) {
  std::array<std::int64_t, nn::Shape::kMaxDims> dims = {samples};
  if (dims_of_one.size() >= dims.size())
    throw UsageError(fmt::format("samples or targets of {} axes", dims_of_one.size()),
                     fmt::format("give them at most {}", dims.size() - 1));
  std::ranges::copy(dims_of_one, dims.begin() + 1);
  return nn::Shape(std::span<const std::int64_t>(dims.data(), dims_of_one.size() + 1));
}

std::string describe_array(const std::vector<std::int64_t>& dims_of_one, bool integers) {
  return fmt::format("[{}] {}", fmt::join(dims_of_one, ", "), name_of(integers ? DType::kI32 : DType::kF32));
}

nn::Tensor rounded(nn::Backend& backend, nn::Tensor numbers, DType activations) {
  if (!numbers.defined() || numbers.dtype() == computed_type(numbers.dtype(), activations)) return numbers;
  nn::Tensor made = backend.empty(numbers.shape(), activations);
  backend.pointwise().cast(numbers, made);
  return made;
}

// A loss compares numbers with such as they are.
nn::Vars comparable(nn::Tape& tape, const nn::Vars& outputs, const nn::Tensor& targets) {
  if (targets.dtype() != DType::kF32) return outputs;
  nn::Vars all;
  for (const nn::Var output : outputs) all.push_back(is_half(output.dtype()) ? nn::to_f32(tape, output) : output);
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

SampleFormat training_format_of(const data::Dataset& dataset) {
  SampleFormat format = format_of(dataset);
  if (!dataset.info().mixing.any()) return format;
  format.target_dims = {dataset.classes()};
  format.numeric_targets = true;
  return format;
}

std::string SampleFormat::describe() const {
  return fmt::format("{}{}, targets {}", describe_array(dims, tokens), further.empty() ? "" : ", " + describe_further(),
                     describe_array(target_dims, !numeric_targets));
}

std::string SampleFormat::describe_further() const {
  std::vector<std::string> all;
  for (const auto& input : further) all.push_back(input.name + " " + describe_array(input.dims, input.integers));
  return join(all, ", ");
}

Inputs make_inputs(const SampleFormat& format, std::int64_t samples,
                   FunctionRef<nn::Tensor(int input, const nn::Shape& shape, DType dtype)> make) {
  Inputs inputs = {.x = make(kSamples, batch_shape(format.dims, samples), format.tokens ? DType::kI32 : DType::kF32),
                   .targets = make(kTargets, batch_shape(format.target_dims, samples),
                                   format.numeric_targets ? DType::kF32 : DType::kI32)};
  int number = kFurther;
  for (const auto& input : format.further)
    inputs.further.push_back(
        make(number++, batch_shape(input.dims, samples), input.integers ? DType::kI32 : DType::kF32));
  return inputs;
}

Inputs inputs_of(nn::Backend& backend, const data::Batch& batch, const SampleFormat& format) {
  const auto data_of = [&](int input, DType dtype) -> void* {
    const bool integers = dtype == DType::kI32;
    if (input == kSamples) return integers ? static_cast<void*>(batch.tokens.data()) : batch.x.data();
    if (input == kTargets) return integers ? static_cast<void*>(batch.labels.data()) : batch.targets.data();
    const data::Array& array = batch.further[static_cast<std::size_t>(input - kFurther)];
    return integers ? static_cast<void*>(array.integers.data()) : array.numbers.data();
  };
  return make_inputs(format, static_cast<std::int64_t>(batch.count),
                     [&](int input, const nn::Shape& shape, DType dtype) {
                       return backend.stage(data_of(input, dtype), shape, dtype, input);
                     });
}

std::uint64_t counted_targets(const data::Batch& batch, std::optional<std::int32_t> ignored) {
  if (batch.labels.empty()) return batch.targets.size();
  const auto left_out = ignored ? std::ranges::count(batch.labels, *ignored) : 0;
  return batch.labels.size() - static_cast<std::uint64_t>(left_out);
}

Inputs no_inputs(nn::Backend& backend, const SampleFormat& format, DType activations) {
  return make_inputs(format, 0, [&](int input, const nn::Shape& shape, DType dtype) {
    return backend.empty(shape, input == kTargets ? dtype : computed_type(dtype, activations));
  });
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
