#include "checkpoint/state_copy.h"
#include "base/error.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "nn/io/safetensors_writer.h"

namespace lockstep::checkpoint {
namespace {

bool all_finite(std::span<const std::byte> f32) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::uint32_t found = 0;
  for (std::size_t at = 0; at < f32.size(); at += sizeof(std::uint32_t)) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, f32.data() + at, sizeof bits);
    found |= static_cast<std::uint32_t>((bits & kExponent) == kExponent);
  }
  return found == 0;
}

}  // namespace

StateCopy::StateCopy(const nn::Optimizer& optimizer, const OwnPart& part) { add_part(optimizer, part); }

// As its memory has it: the whole tensor alone has the file's order.
void StateCopy::add_part(const nn::Optimizer& optimizer, const OwnPart& part) {
  moments_file_ = part_file(part.index, part.count);
  for (auto& [name, parameter, value] : optimizer.moments())
    if (value.count() > 0)
      optimizer_.push_back({{.name = std::move(name), .value = value, .backend = &parameter->backend()}, true, {}});
}

StateCopy::StateCopy(const nn::Module& module, const nn::Optimizer& optimizer, const nn::MovingAverage* average,
                     const OwnPart* part) {
  const std::size_t parameters = module.named_parameters().size();
  for (auto& entry : nn::entries_of(module)) module_.push_back({std::move(entry), module_.size() < parameters, {}});
  if (part != nullptr)
    add_part(optimizer, *part);
  else
    for (auto& entry : nn::entries_of(optimizer)) optimizer_.push_back({std::move(entry), true, {}});
  if (average == nullptr) return;
  for (auto& entry : nn::entries_of(module, *average))
    average_.push_back({std::move(entry), average_.size() < parameters, {}});
}

void StateCopy::take(ExtraState extra) {
  extra_files_ = std::move(extra.files);
  const bool gathered = !extra.moments.empty();
  LOCKSTEP_ASSERT(!gathered || extra.moments.size() == optimizer_.size(), "{} of {} moments", extra.moments.size(),
                  optimizer_.size());
  for (std::size_t i = 0; i < extra.moments.size(); ++i) optimizer_[i].memory = std::move(extra.moments[i]);
  for (std::vector<Part>* parts : {&module_, &optimizer_, &average_})
    for (Part& part : *parts) {
      if (gathered && parts == &optimizer_) continue;
      part.memory.resize(part.entry.value.bytes());
      part.entry.backend->download(part.entry.value, part.memory);
    }
}

void StateCopy::free_moments() {
  for (Part& part : optimizer_) part.memory = {};
}

std::optional<std::string> StateCopy::not_finite() const {
  for (const std::vector<Part>* parts : {&module_, &optimizer_, &average_})
    for (const Part& part : *parts)
      if (part.trained && part.entry.value.dtype() == DType::kF32 && !all_finite(part.memory)) return part.entry.name;
  return std::nullopt;
}

CheckpointManifest::File StateCopy::write_file(const std::string& path, const std::vector<Part>& parts,
                                               const std::map<std::string, std::string>& metadata) {
  std::vector<nn::TensorHeader> headers;
  for (const Part& part : parts) headers.push_back(part.entry.header());
  nn::SafetensorsWriter writer(path, headers, metadata);
  for (const Part& part : parts) {
    const auto ordered = part.entry.in_file_order(part.memory);
    writer.add(ordered.empty() ? std::span(part.memory) : std::span(ordered));
  }
  const auto written = writer.commit();
  return {.bytes = written.bytes, .sha256 = written.sha256};
}

std::map<std::string, CheckpointManifest::File> StateCopy::write(
    const std::string& directory, const std::map<std::string, std::string>& metadata) const {
  std::map<std::string, CheckpointManifest::File> files;
  if (!module_.empty())
    files[kWeightsFile] = write_file(fmt::format("{}/{}", directory, kWeightsFile), module_, metadata);
  files[moments_file_] = write_file(fmt::format("{}/{}", directory, moments_file_), optimizer_, {});
  if (!average_.empty())
    files[kAverageFile] = write_file(fmt::format("{}/{}", directory, kAverageFile), average_, metadata);
  for (const auto& [name, tensors] : extra_files_) {
    if (tensors.empty()) continue;
    std::vector<nn::TensorHeader> headers;
    for (const auto& tensor : tensors)
      headers.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes.size()});
    nn::SafetensorsWriter writer(fmt::format("{}/{}", directory, name), headers);
    for (const auto& tensor : tensors) writer.add(tensor.bytes);
    const auto written = writer.commit();
    files[name] = {.bytes = written.bytes, .sha256 = written.sha256};
  }
  return files;
}

}  // namespace lockstep::checkpoint
