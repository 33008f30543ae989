#include "trainer/not_finite.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <ranges>

#include "lockstep/nn/ops/transfer.h"

namespace lockstep::trainer {
namespace {

bool is_finite(nn::Backend& backend, const nn::Tensor& tensor) {
  if (!tensor.defined() || tensor.count() == 0 || !(tensor.dtype() == DType::kF32 || is_half(tensor.dtype())))
    return true;
  nn::Tensor f32 = backend.contiguous(tensor);
  if (f32.dtype() != DType::kF32) {
    const nn::Tensor half = f32;
    f32 = backend.empty(half.shape());
    backend.pointwise().cast(half, f32);
  }
  return std::ranges::all_of(nn::values_of(backend, f32), [](float value) { return std::isfinite(value); });
}

}  // namespace

std::string first_not_finite(nn::Backend& backend, nn::Module& module, nn::Tape& tape, const Inputs& inputs) {
  bool finite = is_finite(backend, inputs.x) && is_finite(backend, inputs.targets);
  for (const nn::Tensor& one : inputs.further) finite = finite && is_finite(backend, one);
  if (!finite) return "the samples' numbers";
  std::map<const nn::Parameter*, std::string> layers;
  for (const auto& [name, parameter] : module.named_parameters()) {
    if (!is_finite(backend, parameter->value())) return name;
    layers[parameter] = name.substr(0, name.rfind('.'));
  }
  tape.reset();
  module(tape, inputs.on(tape));
  std::string found, layer;
  tape.each_recorded([&](const nn::OpLabel& label, nn::Var result) {
    const auto of_layer = layers.find(label.parameter);
    if (of_layer != layers.end()) layer = of_layer->second;
    if (!found.empty() || is_finite(backend, result.value())) return;
    if (of_layer != layers.end())
      found = fmt::format("the output of {} ({})", layer, label.op);
    else
      found = fmt::format("the output of {}{}{}", label.op, layer.empty() ? "" : " after ", layer);
  });
  tape.reset();
  return found;
}

std::string first_gradient_not_finite(nn::Backend& backend, nn::Module& module) {
  for (const auto& [name, parameter] : module.named_parameters() | std::views::reverse)
    if (parameter->has_gradient() && !is_finite(backend, parameter->gradient()))
      return fmt::format("the gradient of {}", name);
  return {};
}

}  // namespace lockstep::trainer
