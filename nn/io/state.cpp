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
  if (layout == FileLayout::kTransposed) return {s[1], s[0]};
  return {s.dims().begin(), s.dims().end()};
}

// Exchanges the last two axes of (O, rows, columns) f32: between (O, H·W, I) in memory and (O, I, H·W) in files.
std::vector<std::byte> swapped(std::span<const std::byte> from, std::int64_t outer, std::int64_t rows,
                               std::int64_t columns) {
  std::vector<std::byte> to(from.size());
  constexpr std::size_t kFloat = sizeof(float);
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        std::memcpy(to.data() + static_cast<std::size_t>((o * columns + c) * rows + r) * kFloat,
                    from.data() + static_cast<std::size_t>((o * rows + r) * columns + c) * kFloat, kFloat);
  return to;
}

struct Target {
  const Tensor* value;
  Backend* backend;
  FileLayout layout;
};

HostTensor to_host(const std::string& name, const Target& target) {
  const Tensor& value = *target.value;
  const Shape& s = value.shape();
  HostTensor host{name, value.dtype(), file_shape(value, target.layout), std::vector<std::byte>(value.bytes())};
  target.backend->download(value, host.bytes);
  if (target.layout == FileLayout::kOhwiToOihw) host.bytes = swapped(host.bytes, s[0], s[1] * s[2], s[3]);
  if (target.layout == FileLayout::kTransposed) host.bytes = swapped(host.bytes, 1, s[0], s[1]);
  return host;
}

void from_host(const HostTensor& host, const Target& target) {
  const Shape& s = target.value->shape();
  if (target.layout == FileLayout::kOhwiToOihw)
    target.backend->upload(swapped(host.bytes, s[0], s[3], s[1] * s[2]), *target.value);
  else if (target.layout == FileLayout::kTransposed)
    target.backend->upload(swapped(host.bytes, 1, s[1], s[0]), *target.value);
  else
    target.backend->upload(host.bytes, *target.value);
}

Target target_of(const NamedParameter& named) {
  return {&named.parameter->value(), &named.parameter->backend(), named.parameter->layout()};
}
Target target_of(const NamedBuffer& named) { return {named.tensor, named.backend, FileLayout::kSame}; }

// Not a Shape: files may have more dimensions.
std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

std::vector<HostTensor> state_of(const Module& module) {
  std::vector<HostTensor> state;
  for (const auto& named : module.named_parameters()) state.push_back(to_host(named.name, target_of(named)));
  for (const auto& named : module.named_buffers()) state.push_back(to_host(named.name, target_of(named)));
  return state;
}

void load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source) {
  std::map<std::string, Target> targets;
  for (const auto& named : module.named_parameters()) targets[named.name] = target_of(named);
  for (const auto& named : module.named_buffers()) targets[named.name] = target_of(named);

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

  for (const auto& [name, target] : targets) from_host(*given[name], target);
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
}

std::string parameters_sha256(const Module& module) {
  auto parameters = module.named_parameters();
  std::sort(parameters.begin(), parameters.end(),
            [](const NamedParameter& a, const NamedParameter& b) { return a.name < b.name; });
  Sha256 hash;
  for (const auto& named : parameters) {
    hash.update(named.name);
    hash.update(to_host(named.name, target_of(named)).bytes);
  }
  return hash.finish();
}

}  // namespace lockstep::nn
