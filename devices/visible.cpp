#include "devices/visible.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::devices {
namespace {

constexpr const char* kVariable = "CUDA_VISIBLE_DEVICES";

using Devices = std::vector<VisibleDevice>;

VisibleDevice whole(const Gpu& gpu, std::size_t position) {
  VisibleDevice device;
  device.gpu = gpu.index;
  device.id = gpu.uuid.value_or(std::to_string(position));
  if (gpu.memory) device.free_bytes = gpu.memory->free_bytes;
  device.prohibited = gpu.compute_mode == ComputeMode::kProhibited;
  return device;
}

/// Before driver 470 MIG devices were named after their GPU and their two instances.
std::optional<std::string> old_mig_id(const Gpu& gpu, const MigDevice& mig) {
  if (!gpu.uuid || !mig.gpu_instance || !mig.compute_instance) return std::nullopt;
  return fmt::format("MIG-{}/{}/{}", *gpu.uuid, *mig.gpu_instance, *mig.compute_instance);
}

VisibleDevice part(const Gpu& gpu, const MigDevice& mig) {
  VisibleDevice device;
  device.gpu = gpu.index;
  device.mig = mig.index;
  device.id = mig.uuid.value_or(old_mig_id(gpu, mig).value_or(""));
  if (mig.memory) device.free_bytes = mig.memory->free_bytes;
  device.prohibited = gpu.compute_mode == ComputeMode::kProhibited;
  return device;
}

Devices devices_of(const Gpu& gpu, std::size_t position) {
  if (!gpu.mig.value_or(false)) return {whole(gpu, position)};
  Devices devices;
  for (const auto& mig : gpu.mig_devices) devices.push_back(part(gpu, mig));
  return devices;
}

/// What one name stands for; nothing if it names none, or several that are not parts of one.
Devices named_by_uuid(std::span<const Gpu* const> gpus, std::string_view name) {
  std::vector<Devices> matches;
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    const Gpu& gpu = *gpus[i];
    if (name.starts_with("GPU-") && gpu.uuid && gpu.uuid->starts_with(name)) matches.push_back(devices_of(gpu, i));
    if (!name.starts_with("MIG-")) continue;
    for (const auto& mig : gpu.mig_devices)
      if ((mig.uuid && mig.uuid->starts_with(name)) || old_mig_id(gpu, mig) == name)
        matches.push_back({part(gpu, mig)});
  }
  return matches.size() == 1 ? matches.front() : Devices{};
}

Devices named_by_index(std::span<const Gpu* const> gpus, std::string_view name) {
  const auto index = parse_int(name);
  if (!index || *index < 0 || static_cast<std::size_t>(*index) >= gpus.size()) return {};
  const auto position = static_cast<std::size_t>(*index);
  return devices_of(*gpus[position], position);
}

bool is_uuid(std::string_view name) { return name.starts_with("GPU-") || name.starts_with("MIG-"); }

}  // namespace

Devices visible_gpus(const Gpus& gpus, const EnvLookup& lookup) {
  std::vector<const Gpu*> answering;
  for (const auto& gpu : gpus.list)
    if (!gpu.problem) answering.push_back(&gpu);

  Devices visible;
  const auto wanted = lookup(kVariable);
  if (!wanted) {
    for (std::size_t i = 0; i < answering.size(); ++i)
      std::ranges::copy(devices_of(*answering[i], i), std::back_inserter(visible));
    return visible;
  }
  const auto pieces = split(*wanted, ',');
  const bool by_uuid = is_uuid(trim(pieces.front()));
  for (const auto& piece : pieces) {
    const auto name = trim(piece);
    const Devices named = by_uuid ? named_by_uuid(answering, name) : named_by_index(answering, name);
    if (named.empty()) break;
    for (const auto& device : named) {
      if (std::ranges::find(visible, device) != visible.end()) return {};
      visible.push_back(device);
    }
  }
  return visible;
}

std::vector<int> most_free(std::span<const VisibleDevice> visible, int count) {
  LOCKSTEP_ASSERT(count >= 0, "{} devices", count);
  std::vector<int> positions(visible.size());
  std::iota(positions.begin(), positions.end(), 0);
  const auto device = [&](int position) -> const VisibleDevice& { return visible[static_cast<std::size_t>(position)]; };
  std::erase_if(positions, [&](int position) { return device(position).prohibited; });
  std::ranges::stable_sort(positions, std::ranges::greater(),
                           [&](int position) { return device(position).free_bytes.value_or(-1); });
  if (positions.size() > static_cast<std::size_t>(count)) positions.resize(static_cast<std::size_t>(count));
  return positions;
}

std::vector<int> emptiest(std::span<const VisibleDevice> visible) {
  // A context and a desktop take less than a tenth of a card, and a training more.
  constexpr double kShare = 0.9;
  std::vector<int> positions = most_free(visible, static_cast<int>(visible.size()));
  const auto free_bytes = [&](int position) {
    return static_cast<double>(visible[static_cast<std::size_t>(position)].free_bytes.value_or(-1));
  };
  if (positions.empty()) return {};
  const double least = std::max(0.0, kShare * free_bytes(positions.front()));
  std::erase_if(positions, [&](int position) { return free_bytes(position) < least; });
  return positions;
}

}  // namespace lockstep::devices
