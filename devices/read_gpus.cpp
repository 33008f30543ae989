#include "devices/nvml.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>

namespace lockstep::devices {
namespace {

using nvml::Return;

constexpr unsigned kTextBytes = 512;  // more than any text of NVML's

/// "00000000:1B:00.0" → "0000:1b:00.0", as /sys/bus/pci/devices has it; domains that take more digits keep them.
std::string sysfs_bus_id(std::string id) {
  std::ranges::transform(id, id.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (id.find(':') == 8 && id.starts_with("0000")) id.erase(0, 4);
  return id;
}

/// Nothing on machines without NUMA, where the file holds -1.
std::optional<int> numa_node_of(const std::filesystem::path& sysfs, const std::string& bus_id) {
  std::ifstream file(sysfs / "bus/pci/devices" / bus_id / "numa_node");
  int node = -1;
  if (!(file >> node) || node < 0) return std::nullopt;
  return node;
}

/// Asks one card. Once it has failed it is left alone: each further question may take seconds.
class Card {
 public:
  Card(const Nvml& nvml, nvml::Device device, Gpu& gpu)
      : nvml_(nvml), f_(nvml.functions()), device_(device), gpu_(gpu) {}

  void read_choice(const std::filesystem::path& sysfs);
  void read_rest();

 private:
  /// `get` fills what it is given. `field` names it, should this user not be allowed to read it.
  template <class Out, class Get>
  std::optional<Out> ask(const char* field, const Get& get) {
    if (gpu_.problem) return std::nullopt;
    Out out = {};
    return accept(field, get(out)) ? std::optional<Out>(out) : std::nullopt;
  }

  template <class Out>
  std::optional<int> ask(const char* field, NvmlFunctions::Getter<Out>* getter, nvml::Device device) {
    const auto value = ask<Out>(field, [&](Out& out) { return call(getter, device, &out); });
    return value && std::in_range<int>(*value) ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
  }
  std::optional<int> ask(const char* field, NvmlFunctions::Getter<unsigned>* getter) {
    return ask<unsigned>(field, getter, device_);
  }

  std::optional<bool> ask_switch(const char* field, NvmlFunctions::Getter<unsigned>* getter) {
    const auto state = ask(field, getter);
    return state ? std::optional<bool>(*state != 0) : std::nullopt;
  }

  std::optional<bool> ask_switch(const char* field, Return (*getter)(nvml::Device, unsigned*, unsigned*)) {
    const auto state = ask<unsigned>(field, [&](unsigned& current) {
      unsigned pending = 0;
      return call(getter, device_, &current, &pending);
    });
    return state ? std::optional<bool>(*state != 0) : std::nullopt;
  }

  std::optional<std::string> ask_text(const char* field, NvmlFunctions::TextGetter* getter, nvml::Device device) {
    const auto text = ask<std::array<char, kTextBytes>>(
        field, [&](auto& buffer) { return call(getter, device, buffer.data(), kTextBytes - 1); });
    return text && (*text)[0] != '\0' ? std::optional<std::string>(text->data()) : std::nullopt;
  }

  bool accept(const char* field, Return result);
  void read_nvlinks();
  std::optional<int> temperature();
  std::optional<double> power(const char* field, NvmlFunctions::Getter<unsigned>* getter);
  std::optional<Memory> memory_of(nvml::Device device);
  void read_mig_devices();
  void add_processes(nvml::Device device, std::optional<int> mig);
  void add_processes(nvml::Device device, std::optional<int> mig, const NvmlFunctions::ProcessList& list,
                     const char* type);
  void add_process(const nvml::ProcessV2& entry, const char* type, std::optional<int> mig);

  const Nvml& nvml_;
  const NvmlFunctions& f_;
  nvml::Device device_;
  Gpu& gpu_;
  std::map<int, nvml::Device> mig_handles_;
};

bool Card::accept(const char* field, Return result) {
  switch (result) {
    case Return::kSuccess: return true;
    case Return::kNoPermission:
      if (std::ranges::find(gpu_.denied, field) == gpu_.denied.end()) gpu_.denied.emplace_back(field);
      return false;
    case Return::kGpuIsLost:
    case Return::kResetRequired: gpu_.problem = nvml_.problem_of(result); return false;
    default: return false;  // the card has no such thing, or the driver does not say
  }
}

std::optional<Memory> Card::memory_of(nvml::Device device) {
  const auto with_reserved = ask<nvml::MemoryV2>("memory", [&](nvml::MemoryV2& out) {
    out.version = nvml::struct_version<nvml::MemoryV2>(2);
    return call(f_.memory_v2, device, &out);
  });
  const auto bytes = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  if (with_reserved)
    return Memory{bytes(with_reserved->total), bytes(with_reserved->free), bytes(with_reserved->used),
                  bytes(with_reserved->reserved)};
  const auto plain =
      ask<nvml::MemoryV1>("memory", [&](nvml::MemoryV1& out) { return call(f_.memory_v1, device, &out); });
  if (!plain) return std::nullopt;
  return Memory{bytes(plain->total), bytes(plain->free), bytes(plain->used), std::nullopt};
}

void Card::read_mig_devices() {
  const int most = ask("MIG devices", f_.most_mig_devices).value_or(0);
  for (int index = 0; index < most; ++index) {
    const auto handle = ask<nvml::Device>("MIG devices", [&](nvml::Device& out) {
      return call(f_.mig_device, device_, static_cast<unsigned>(index), &out);
    });
    if (!handle) continue;  // an index that no MIG device has
    MigDevice mig;
    mig.index = index;
    mig.name = ask_text("name", f_.name, *handle);
    mig.uuid = ask_text("UUID", f_.uuid, *handle);
    mig.gpu_instance = ask<unsigned>("MIG devices", f_.gpu_instance, *handle);
    mig.compute_instance = ask<unsigned>("MIG devices", f_.compute_instance, *handle);
    mig.memory = memory_of(*handle);
    mig_handles_[index] = *handle;
    gpu_.mig_devices.push_back(std::move(mig));
  }
}

void Card::read_choice(const std::filesystem::path& sysfs) {
  gpu_.name = ask_text("name", f_.name, device_);
  gpu_.uuid = ask_text("UUID", f_.uuid, device_);
  if (const auto pci = ask<nvml::PciInfo>("bus id", [&](nvml::PciInfo& out) { return call(f_.pci, device_, &out); })) {
    const std::string_view id(pci->bus_id, ::strnlen(pci->bus_id, sizeof pci->bus_id));
    gpu_.bus_id = sysfs_bus_id(std::string(id));
    gpu_.numa_node = numa_node_of(sysfs, *gpu_.bus_id);
  }
  gpu_.memory = memory_of(device_);
  if (const auto mode = ask("compute mode", f_.compute_mode); mode && *mode <= 3)
    gpu_.compute_mode = static_cast<ComputeMode>(*mode);
  gpu_.mig = ask_switch("MIG", f_.mig_mode);
  if (gpu_.mig.value_or(false)) read_mig_devices();
}

std::optional<int> Card::temperature() {
  const auto newer = ask<nvml::TemperatureV1>("temperature", [&](nvml::TemperatureV1& out) {
    out.version = nvml::struct_version<nvml::TemperatureV1>(1);
    out.sensor = nvml::kGpuSensor;
    return call(f_.temperature_v1, device_, &out);
  });
  if (newer) return newer->temperature;
  const auto older = ask<unsigned>(
      "temperature", [&](unsigned& out) { return call(f_.temperature, device_, nvml::kGpuSensor, &out); });
  return older ? std::optional<int>(static_cast<int>(*older)) : std::nullopt;
}

std::optional<double> Card::power(const char* field, NvmlFunctions::Getter<unsigned>* getter) {
  const auto milliwatts = ask(field, getter);
  return milliwatts ? std::optional<double>(*milliwatts / 1000.0) : std::nullopt;
}

std::vector<std::string> slowdowns_of(std::uint64_t reasons) {
  std::vector<std::string> texts;
  if ((reasons & (nvml::kSlowedByHeat | nvml::kSlowedByHeatInSoftware)) != 0) texts.emplace_back("heat");
  if ((reasons & nvml::kSlowedByPowerBrake) != 0) texts.emplace_back("power brake");
  // The general one comes with each of the hardware's.
  if (reasons & nvml::kSlowedByHardware && texts.empty()) texts.emplace_back("its hardware");
  return texts;
}

void Card::read_rest() {
  gpu_.persistence = ask_switch("persistence", f_.persistence);
  gpu_.display = ask_switch("display", f_.display);
  gpu_.ecc = ask_switch("ECC", f_.ecc);
  if (gpu_.ecc.value_or(false)) {
    const auto errors = ask<std::uint64_t>("ECC errors", [&](std::uint64_t& out) {
      return call(f_.ecc_errors, device_, nvml::kUncorrectedErrors, nvml::kSinceDriverLoaded, &out);
    });
    if (errors) gpu_.ecc_errors = static_cast<std::int64_t>(*errors);
  }
  gpu_.fan_percent = ask("fan", f_.fan);
  gpu_.temperature_c = temperature();
  if (const auto state = ask("performance state", f_.performance_state);
      state && *state != static_cast<int>(nvml::kUnknownPerformanceState))
    gpu_.performance_state = state;
  gpu_.power_w = power("power", f_.power_mw);
  gpu_.power_cap_w = power("power cap", f_.enforced_power_cap_mw);
  if (!gpu_.power_cap_w) gpu_.power_cap_w = power("power cap", f_.set_power_cap_mw);
  if (const auto busy = ask<nvml::Utilization>(
          "utilisation", [&](nvml::Utilization& out) { return call(f_.utilization, device_, &out); })) {
    gpu_.utilisation_percent = static_cast<int>(busy->gpu);
    gpu_.memory_utilisation_percent = static_cast<int>(busy->memory);
  }
  gpu_.pcie_width = ask("PCIe", f_.pcie_width);
  gpu_.most_pcie_width = ask("PCIe", f_.most_pcie_width);
  const auto reasons =
      ask<std::uint64_t>("clocks", [&](std::uint64_t& out) { return call(f_.clock_reasons, device_, &out); });
  gpu_.slowed_by = slowdowns_of(reasons.value_or(0));
  read_nvlinks();
  // Of the whole card only those with special rights may see who runs on its parts.
  if (!gpu_.mig.value_or(false)) add_processes(device_, std::nullopt);
  for (const auto& [index, handle] : mig_handles_) add_processes(handle, index);
}

void Card::read_nvlinks() {
  for (unsigned link = 0; link < nvml::kMostNvlinks; ++link) {
    const auto up = ask<unsigned>("NVLink", [&](unsigned& out) { return call(f_.nvlink_state, device_, link, &out); });
    if (!up) return;  // no such link, and none after it
    ++(*up != 0 ? gpu_.nvlinks_up : gpu_.nvlinks_down);
  }
}

void Card::add_processes(nvml::Device device, std::optional<int> mig) {
  add_processes(device, mig, f_.computing, "C");
  add_processes(device, mig, f_.drawing, "G");
  add_processes(device, mig, f_.sharing, "M+C");
}

// Note [Wide entries]
// Some drivers of the series 535 write entries of 32 bytes where their interface has 24: a field was added and later
// removed, under the same function name. So the buffer is large enough for wide entries, and bytes written beyond the
// narrow ones show which kind it is.
void Card::add_processes(nvml::Device device, std::optional<int> mig, const NvmlFunctions::ProcessList& list,
                         const char* type) {
  constexpr std::size_t kWideBytes = 32;
  constexpr auto kUntouched = std::byte{0xa5};
  constexpr int kMostTries = 5;  // processes may come while they are being counted

  std::vector<std::byte> buffer;
  unsigned count = 0, room = 64;
  for (int tries = 0;; ++tries) {
    buffer.assign(room * kWideBytes, kUntouched);
    count = room;
    if (gpu_.problem) return;
    const Return result = call(list.get, device, &count, static_cast<void*>(buffer.data()));
    if (result == Return::kInsufficientSize && tries < kMostTries) {
      room = std::max(count, room) * 2;
      continue;
    }
    if (!accept("processes", result)) return;
    break;
  }
  count = std::min(count, room);
  std::size_t entry_bytes = list.entry_bytes;
  if (entry_bytes == sizeof(nvml::ProcessV2)) {
    const auto beyond = buffer.begin() + static_cast<std::ptrdiff_t>(count * entry_bytes);
    if (std::any_of(beyond, buffer.end(), [&](std::byte b) { return b != kUntouched; })) entry_bytes = kWideBytes;
  }
  for (std::size_t i = 0; i < count; ++i) {
    nvml::ProcessV2 entry = {};
    std::memcpy(&entry, buffer.data() + i * entry_bytes, std::min(entry_bytes, sizeof entry));
    add_process(entry, type, mig);
  }
}

void Card::add_process(const nvml::ProcessV2& entry, const char* type, std::optional<int> mig) {
  const auto same = std::ranges::find_if(
      gpu_.processes, [&](const GpuProcess& other) { return other.pid == entry.pid && other.mig == mig; });
  if (same != gpu_.processes.end()) {
    if (same->type == "C" && std::string_view(type) == "G") same->type = "C+G";
    if (same->type == "C" && std::string_view(type) == "M+C") same->type = "M+C";
    return;
  }
  GpuProcess process;
  process.pid = entry.pid;
  process.type = type;
  process.mig = mig;
  if (entry.used_memory != nvml::kNotAvailable) process.memory_bytes = static_cast<std::int64_t>(entry.used_memory);
  std::array<char, kTextBytes> name = {};
  // A process that has ended, or is another user's, has no name: no reason to call anything denied.
  if (call(f_.process_name, entry.pid, name.data(), kTextBytes - 1) == Return::kSuccess && name[0] != '\0')
    process.name = name.data();
  gpu_.processes.push_back(std::move(process));
}

std::optional<std::string> driver_version(const NvmlFunctions& f) {
  std::array<char, kTextBytes> text = {};
  if (call(f.driver_version, text.data(), kTextBytes - 1) != Return::kSuccess) return std::nullopt;
  return text.data();
}

std::optional<std::string> cuda_version(const NvmlFunctions& f) {
  int version = 0;
  if (call(f.cuda_version, &version) != Return::kSuccess || version <= 0) return std::nullopt;
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

const char* text_of(nvml::PeerStatus status) {
  switch (status) {
    case nvml::PeerStatus::kChipset: return "the chipset does not support it";
    case nvml::PeerStatus::kGpu: return "the cards do not support it";
    case nvml::PeerStatus::kTopology: return "what lies between their slots does not support it";
    case nvml::PeerStatus::kDisabled: return "the driver's settings forbid it";
    default: return "the driver does not say why";
  }
}

struct Handle {
  int index;
  nvml::Device device;
};

std::vector<GpuPair> pairs_of(const NvmlFunctions& f, const std::vector<Handle>& cards) {
  std::vector<GpuPair> pairs;
  for (std::size_t i = 0; i < cards.size(); ++i)
    for (std::size_t j = i + 1; j < cards.size(); ++j) {
      GpuPair& pair = pairs.emplace_back();
      pair.first = cards[i].index;
      pair.second = cards[j].index;
      const auto ask = [&](nvml::PeerCapability capability) {
        nvml::PeerStatus status = {};
        const Return result = call(f.peer_status, cards[i].device, cards[j].device, capability, &status);
        return result == Return::kSuccess ? status : nvml::PeerStatus::kUnknown;
      };
      const nvml::PeerStatus reads = ask(nvml::PeerCapability::kRead);
      pair.nvlink = ask(nvml::PeerCapability::kNvlink) == nvml::PeerStatus::kOk;
      if (reads == nvml::PeerStatus::kUnknown) continue;
      pair.reads = reads == nvml::PeerStatus::kOk;
      if (!*pair.reads) pair.reason = text_of(reads);
    }
  return pairs;
}

}  // namespace

Gpus read_gpus(const Nvml& nvml, Detail detail, const std::filesystem::path& sysfs) {
  Gpus gpus;
  gpus.problem = nvml.problem();
  if (gpus.problem) return gpus;
  const NvmlFunctions& f = nvml.functions();
  gpus.driver_version = driver_version(f);
  gpus.cuda_version = cuda_version(f);
  unsigned count = 0;
  if (const Return result = call(f.count, &count); result != Return::kSuccess) {
    gpus.problem = nvml.problem_of(result);
    return gpus;
  }
  std::vector<Handle> cards;
  for (unsigned index = 0; index < count; ++index) {
    Gpu& gpu = gpus.list.emplace_back();
    gpu.index = static_cast<int>(index);
    nvml::Device device = nullptr;
    if (const Return result = call(f.handle, index, &device); result != Return::kSuccess) {
      gpu.problem = nvml.problem_of(result);
      continue;
    }
    Card card(nvml, device, gpu);
    card.read_choice(sysfs);
    if (detail == Detail::kAll) card.read_rest();
    std::ranges::sort(gpu.processes, {}, [](const GpuProcess& p) { return std::pair(p.mig, p.pid); });
    if (!gpu.problem) cards.push_back({gpu.index, device});
  }
  if (detail == Detail::kAll) gpus.pairs = pairs_of(f, cards);
  return gpus;
}

Gpus read_gpus(Detail detail) {
  const Nvml nvml;
  return read_gpus(nvml, detail);
}

}  // namespace lockstep::devices
