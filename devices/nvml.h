// NVIDIA's management library, found when the program runs: no build and no start depends on it. Reads the machine's
// GPUs from it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/machine.h"
#include "devices/nvml_abi.h"

namespace lockstep::devices {

/// The address of a function of the library; nullptr if it has none of that name.
using Symbols = std::function<void*(const char* name)>;

/// The functions of NVML that are used; those that the library lacks are nullptr. `call` takes either.
struct NvmlFunctions {
  using Return = nvml::Return;
  using Device = nvml::Device;
  template <class Out>
  using Getter = Return(Device, Out*);
  using TextGetter = Return(Device, char*, unsigned);
  using ProcessGetter = Return(Device, unsigned* count, void* entries);

  explicit NvmlFunctions(const Symbols& symbols);

  Return (*init)() = nullptr;
  Return (*shutdown)() = nullptr;
  const char* (*error_string)(Return) = nullptr;
  Return (*driver_version)(char*, unsigned) = nullptr;
  Return (*cuda_version)(int*) = nullptr;
  Return (*process_name)(unsigned pid, char*, unsigned) = nullptr;
  Return (*count)(unsigned*) = nullptr;
  Return (*handle)(unsigned index, Device*) = nullptr;

  TextGetter* name = nullptr;
  TextGetter* uuid = nullptr;
  Getter<nvml::PciInfo>* pci = nullptr;
  Getter<unsigned>* persistence = nullptr;
  Getter<unsigned>* display = nullptr;
  Return (*ecc)(Device, unsigned* current, unsigned* pending) = nullptr;
  Return (*ecc_errors)(Device, unsigned type, unsigned counter, std::uint64_t*) = nullptr;
  Getter<unsigned>* fan = nullptr;
  Getter<nvml::TemperatureV1>* temperature_v1 = nullptr;
  Return (*temperature)(Device, unsigned sensor, unsigned*) = nullptr;
  Getter<unsigned>* performance_state = nullptr;
  Getter<unsigned>* power_mw = nullptr;
  Getter<unsigned>* enforced_power_cap_mw = nullptr;
  Getter<unsigned>* set_power_cap_mw = nullptr;
  Getter<nvml::MemoryV2>* memory_v2 = nullptr;
  Getter<nvml::MemoryV1>* memory_v1 = nullptr;
  Getter<nvml::Utilization>* utilization = nullptr;
  Getter<unsigned>* compute_mode = nullptr;
  Return (*mig_mode)(Device, unsigned* current, unsigned* pending) = nullptr;
  Getter<unsigned>* most_mig_devices = nullptr;
  Return (*mig_device)(Device, unsigned index, Device*) = nullptr;
  Getter<unsigned>* gpu_instance = nullptr;
  Getter<unsigned>* compute_instance = nullptr;
  Getter<unsigned>* pcie_width = nullptr;
  Getter<unsigned>* most_pcie_width = nullptr;
  Getter<std::uint64_t>* clock_reasons = nullptr;
  Return (*nvlink_state)(Device, unsigned link, unsigned* is_up) = nullptr;
  Return (*peer_status)(Device, Device, nvml::PeerCapability, nvml::PeerStatus*) = nullptr;

  struct ProcessList {
    ProcessGetter* get = nullptr;
    std::size_t entry_bytes = 0;
  };
  ProcessList computing, drawing, sharing;  // sharing: through the multi-process service
};

/// A function that the library lacks answers kFunctionNotFound.
template <class... Parameters, class... Arguments>
nvml::Return call(nvml::Return (*function)(Parameters...), Arguments... arguments) {
  return function != nullptr ? function(arguments...) : nvml::Return::kFunctionNotFound;
}

/// The library, loaded and initialised; or the problem that kept it from being so. Not thread-safe.
class Nvml {
 public:
  /// Loads the library of this machine.
  Nvml();
  /// Uses the functions that `symbols` finds in its place, which must outlive this.
  explicit Nvml(const Symbols& symbols);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  const std::optional<Problem>& problem() const { return problem_; }
  /// Only without a problem.
  const NvmlFunctions& functions() const { return *functions_; }
  /// What went wrong with a card that answered `result`, for people.
  Problem problem_of(nvml::Return result) const;

 private:
  struct Unload {
    void operator()(void* library) const;
  };
  void initialise(const Symbols& symbols);

  std::unique_ptr<void, Unload> library_;
  std::optional<NvmlFunctions> functions_;
  std::optional<Problem> problem_;
};

enum class Detail {
  kChoice,  // what choosing among them takes: names, ids, memory, compute mode, MIG devices
  kAll,
};

/// Never throws because of cards or drivers: unknown values are absent, and a card that fails has a `problem`. `sysfs`
/// is /sys, or what stands in for it.
Gpus read_gpus(const Nvml& nvml, Detail detail, const std::filesystem::path& sysfs = "/sys");

/// The same, with the library of this machine, which is unloaded again.
Gpus read_gpus(Detail detail);

}  // namespace lockstep::devices
