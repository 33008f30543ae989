#include "nn/io/state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/sha256.h"
#include "base/text.h"

namespace lockstep::nn {
namespace {

std::vector<std::int64_t> file_shape(const Tensor& value, FileLayout layout) {
  const Shape& s = value.shape();
  if (layout == FileLayout::kOhwiToOihw) return {s[0], s[3], s[1], s[2]};
  return {s.dims().begin(), s.dims().end()};
}

// Copies between (O, H·W, I) in memory and (O, I, H·W) in files.
void move_oihw(float* memory, float* file, const Shape& s, bool to_file) {
  const std::int64_t pixels = s[1] * s[2], in = s[3];
  for (std::int64_t o = 0; o < s[0]; ++o)
    for (std::int64_t p = 0; p < pixels; ++p)
      for (std::int64_t i = 0; i < in; ++i) {
        float& m = memory[(o * pixels + p) * in + i];
        float& f = file[(o * in + i) * pixels + p];
        (to_file ? f : m) = (to_file ? m : f);
      }
}

HostTensor to_host(const std::string& name, const Tensor& value, FileLayout layout) {
  HostTensor host{name, value.dtype(), file_shape(value, layout), std::vector<std::byte>(value.bytes())};
  if (layout == FileLayout::kOhwiToOihw)
    move_oihw(value.f32(), reinterpret_cast<float*>(host.bytes.data()), value.shape(), true);
  else
    std::memcpy(host.bytes.data(), value.raw(), value.bytes());
  return host;
}

void from_host(const HostTensor& host, const Tensor& value, FileLayout layout) {
  if (layout == FileLayout::kOhwiToOihw)
    // move_oihw only reads the file's side here.
    move_oihw(value.f32(), reinterpret_cast<float*>(const_cast<std::byte*>(host.bytes.data())), value.shape(), false);
  else
    std::memcpy(value.raw(), host.bytes.data(), value.bytes());
}

struct Target {
  const Tensor* value;
  FileLayout layout;
};

// Not a Shape: files may have more dimensions.
std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

std::vector<HostTensor> state_of(const Module& module) {
  std::vector<HostTensor> state;
  for (const auto& [name, parameter] : module.named_parameters())
    state.push_back(to_host(name, parameter->value(), parameter->layout()));
  for (const auto& [name, tensor] : module.named_buffers()) state.push_back(to_host(name, *tensor, FileLayout::kSame));
  return state;
}

void load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source) {
  std::map<std::string, Target> targets;
  for (const auto& [name, parameter] : module.named_parameters())
    targets[name] = {&parameter->value(), parameter->layout()};
  for (const auto& [name, tensor] : module.named_buffers()) targets[name] = {tensor, FileLayout::kSame};

  std::vector<std::string> unexpected, misshapen, missing;
  std::map<std::string, const HostTensor*> given;
  for (const auto& tensor : tensors) {
    given[tensor.name] = &tensor;
    const auto target = targets.find(tensor.name);
    if (target == targets.end()) {
      unexpected.push_back(tensor.name);
      continue;
    }
    const auto wanted = file_shape(*target->second.value, target->second.layout);
    LOCKSTEP_ASSERT(tensor.shape != wanted || tensor.dtype != target->second.value->dtype() ||
                        tensor.bytes.size() == target->second.value->bytes(),
                    "{} bytes of {}", tensor.bytes.size(), tensor.name);
    if (tensor.shape != wanted || tensor.dtype != target->second.value->dtype())
      misshapen.push_back(fmt::format("{} is {} {}, not {} {}", tensor.name, lockstep::name_of(tensor.dtype),
                                      shape_text(tensor.shape), lockstep::name_of(target->second.value->dtype()),
                                      shape_text(wanted)));
  }
  for (const auto& [name, target] : targets)
    if (!given.contains(name)) missing.push_back(name);
  std::vector<std::string> faults;
  if (!missing.empty()) faults.push_back("missing " + join(missing, ", "));
  if (!unexpected.empty()) faults.push_back("unexpected " + join(unexpected, ", "));
  if (!misshapen.empty()) faults.push_back(join(misshapen, ", "));
  if (!faults.empty())
    throw UsageError(fmt::format("weights {} do not fit the model: {}", source, join(faults, "; ")),
                     "load them into the model that they were saved from");

  for (const auto& [name, target] : targets) from_host(*given[name], *target.value, target.layout);
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
}

std::string parameters_sha256(const Module& module) {
  auto parameters = module.named_parameters();
  std::sort(parameters.begin(), parameters.end(),
            [](const NamedParameter& a, const NamedParameter& b) { return a.name < b.name; });
  Sha256 hash;
  for (const auto& [name, parameter] : parameters) {
    hash.update(name);
    hash.update(to_host(name, parameter->value(), parameter->layout()).bytes);
  }
  return hash.finish();
}

}  // namespace lockstep::nn
