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

// What all names start with that DataParallel and its like, or a GPT-2 with a head, put in front of them.
std::size_t prefix_of(const std::vector<HostTensor>& tensors) {
  std::size_t prefix = 0;
  for (const std::string_view part : {"module.", "transformer."})
    if (!tensors.empty() && std::ranges::all_of(tensors, [&](const HostTensor& tensor) {
          const std::string_view name = std::string_view(tensor.name).substr(prefix);
          // The head of a GPT-2 stands beside the transformer, and is its embedding again.
          return name.starts_with(part) || (part == "transformer." && name == "lm_head.weight");
        }))
      prefix += part.size();
  return prefix;
}

// What files of GPT-2 hold beside its parameters: the mask of its attention, and its embedding a second time.
bool is_derived(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name == "lm_head.weight";
}

bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16; }
bool converts(DType from, DType to) { return from == to || (to == DType::kF32 && is_float(from)); }

HostTensor as_type(const HostTensor& tensor, DType dtype) {
  if (tensor.dtype == dtype) return tensor;
  const std::size_t count = tensor.bytes.size() / size_of(tensor.dtype);
  HostTensor made{tensor.name, dtype, tensor.shape, std::vector<std::byte>(count * sizeof(float))};
  for (std::size_t i = 0; i < count; ++i) {
    float value = 0;
    if (tensor.dtype == DType::kF64) {
      double wide = 0;
      std::memcpy(&wide, tensor.bytes.data() + i * sizeof wide, sizeof wide);
      value = static_cast<float>(wide);
    } else {
      BFloat16 narrow;
      std::memcpy(&narrow, tensor.bytes.data() + i * sizeof narrow, sizeof narrow);
      value = narrow.to_float();
    }
    std::memcpy(made.bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return made;
}

// Not a Shape: files may have more dimensions.
std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

std::vector<HostTensor> state_of(const Module& module) {
  std::vector<HostTensor> state;
  for (const auto& named : module.named_parameters()) state.push_back(to_host(named.name, target_of(named)));
  for (const auto& named : module.named_buffers()) state.push_back(to_host(named.name, target_of(named)));
  return state;
}

LoadReport load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source,
                      const LoadOptions& options) {
  std::map<std::string, Target> targets;
  for (const auto& named : module.named_parameters()) targets[named.name] = target_of(named);
  for (const auto& named : module.named_buffers()) targets[named.name] = target_of(named);

  const auto left_out = [&](const std::string& name) {
    return !options.without.empty() && name.starts_with(options.without);
  };
  LoadReport report;
  std::vector<std::string> misshapen;
  const std::size_t prefix = options.keep_prefix ? 0 : prefix_of(tensors);
  std::map<std::string, const HostTensor*> given;
  for (const auto& tensor : tensors) {
    const std::string name = tensor.name.substr(prefix);
    if (left_out(name)) continue;
    const auto target = targets.find(name);
    if (target == targets.end()) {
      if (!is_derived(name)) report.unexpected.push_back(name);
      continue;
    }
    given[name] = &tensor;
    const Tensor& value = *target->second.value;
    const auto wanted = file_shape(value, target->second.layout);
    if (tensor.shape != wanted || !converts(tensor.dtype, value.dtype()))
      misshapen.push_back(fmt::format("{} is {} {}, not {} {}", name, lockstep::name_of(tensor.dtype),
                                      shape_text(tensor.shape), lockstep::name_of(value.dtype()), shape_text(wanted)));
    else
      LOCKSTEP_ASSERT(tensor.bytes.size() == static_cast<std::size_t>(value.count()) * size_of(tensor.dtype),
                      "{} bytes of {}", tensor.bytes.size(), name);
  }
  for (const auto& [name, target] : targets)
    if (!given.contains(name) && !left_out(name)) report.missing.push_back(name);
  std::vector<std::string> faults;
  if (options.strict && !report.missing.empty()) faults.push_back("missing " + join(report.missing, ", "));
  if (options.strict && !report.unexpected.empty()) faults.push_back("unexpected " + join(report.unexpected, ", "));
  if (!misshapen.empty()) faults.push_back(join(misshapen, ", "));
  if (!faults.empty())
    throw UsageError(fmt::format("weights {} do not fit the model: {}", source, join(faults, "; ")),
                     "load them into the model that they were saved from");

  for (const auto& [name, tensor] : given)
    from_host(as_type(*tensor, targets.at(name).value->dtype()), targets.at(name));
  for (const auto& [name, parameter] : module.named_parameters()) parameter->changed();
  return report;
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
