#include "devices/nvml.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <utility>

namespace lockstep::devices {
namespace {

using nvml::Return;

template <class Function>
void find(const Symbols& symbols, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(symbols(name));
}

/// The first of `names` that the library has: newest first, as they all do the same with the same arguments.
template <class Function>
void find(const Symbols& symbols, Function*& function, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    find(symbols, function, name);
    if (function != nullptr) return;
  }
}

NvmlFunctions::ProcessList find_processes(const Symbols& symbols, const std::string& name) {
  NvmlFunctions::ProcessList list;
  for (const char* suffix : {"_v3", "_v2"}) {
    find(symbols, list.get, (name + suffix).c_str());
    list.entry_bytes = sizeof(nvml::ProcessV2);
    if (list.get != nullptr) return list;
  }
  find(symbols, list.get, name.c_str());
  list.entry_bytes = sizeof(nvml::ProcessV1);
  return list;
}

std::string library_error(const std::string& dl_error) {
  // If another file that the library needs is missing, the loader names it.
  if (dl_error.starts_with(nvml::kLibrary) && dl_error.find("No such file") != std::string::npos)
    return fmt::format("no NVIDIA driver on this machine ({} is not there)", nvml::kLibrary);
  return fmt::format("NVIDIA's management library cannot be loaded: {}", dl_error);
}

}  // namespace

NvmlFunctions::NvmlFunctions(const Symbols& symbols) {
  find(symbols, init, "nvmlInit_v2");
  find(symbols, shutdown, "nvmlShutdown");
  find(symbols, error_string, "nvmlErrorString");
  find(symbols, driver_version, "nvmlSystemGetDriverVersion");
  find(symbols, cuda_version, {"nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"});
  find(symbols, process_name, "nvmlSystemGetProcessName");
  find(symbols, count, "nvmlDeviceGetCount_v2");
  find(symbols, handle, "nvmlDeviceGetHandleByIndex_v2");
  find(symbols, name, "nvmlDeviceGetName");
  find(symbols, uuid, "nvmlDeviceGetUUID");
  find(symbols, pci, "nvmlDeviceGetPciInfo_v3");
  find(symbols, persistence, "nvmlDeviceGetPersistenceMode");
  find(symbols, display, "nvmlDeviceGetDisplayActive");
  find(symbols, ecc, "nvmlDeviceGetEccMode");
  find(symbols, ecc_errors, "nvmlDeviceGetTotalEccErrors");
  find(symbols, fan, "nvmlDeviceGetFanSpeed");
  find(symbols, temperature_v1, "nvmlDeviceGetTemperatureV");
  find(symbols, temperature, "nvmlDeviceGetTemperature");
  find(symbols, performance_state, "nvmlDeviceGetPerformanceState");
  find(symbols, power_mw, "nvmlDeviceGetPowerUsage");
  find(symbols, enforced_power_cap_mw, "nvmlDeviceGetEnforcedPowerLimit");
  find(symbols, set_power_cap_mw, "nvmlDeviceGetPowerManagementLimit");
  find(symbols, memory_v2, "nvmlDeviceGetMemoryInfo_v2");
  find(symbols, memory_v1, "nvmlDeviceGetMemoryInfo");
  find(symbols, utilization, "nvmlDeviceGetUtilizationRates");
  find(symbols, compute_mode, "nvmlDeviceGetComputeMode");
  find(symbols, mig_mode, "nvmlDeviceGetMigMode");
  find(symbols, most_mig_devices, "nvmlDeviceGetMaxMigDeviceCount");
  find(symbols, mig_device, "nvmlDeviceGetMigDeviceHandleByIndex");
  find(symbols, gpu_instance, "nvmlDeviceGetGpuInstanceId");
  find(symbols, compute_instance, "nvmlDeviceGetComputeInstanceId");
  find(symbols, pcie_width, "nvmlDeviceGetCurrPcieLinkWidth");
  find(symbols, most_pcie_width, "nvmlDeviceGetMaxPcieLinkWidth");
  find(symbols, clock_reasons, {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"});
  find(symbols, nvlink_state, "nvmlDeviceGetNvLinkState");
  find(symbols, peer_status, "nvmlDeviceGetP2PStatus");
  computing = find_processes(symbols, "nvmlDeviceGetComputeRunningProcesses");
  drawing = find_processes(symbols, "nvmlDeviceGetGraphicsRunningProcesses");
  sharing = find_processes(symbols, "nvmlDeviceGetMPSComputeRunningProcesses");
}

Nvml::Nvml() : library_(::dlopen(nvml::kLibrary, RTLD_NOW | RTLD_LOCAL)) {
  if (!library_) {
    const char* error = ::dlerror();
    problem_ = Problem{library_error(error != nullptr ? error : "no reason given"), ""};
    return;
  }
  initialise([this](const char* name) { return ::dlsym(library_.get(), name); });
}

Nvml::Nvml(const Symbols& symbols) { initialise(symbols); }

Nvml::~Nvml() {
  if (!problem_) call(functions_->shutdown);
}

void Nvml::Unload::operator()(void* library) const { ::dlclose(library); }

void Nvml::initialise(const Symbols& symbols) {
  functions_.emplace(symbols);
  if (functions_->init == nullptr || functions_->count == nullptr || functions_->handle == nullptr) {
    problem_ = Problem{fmt::format("{} is older than what lockstep asks of it, or not NVIDIA's", nvml::kLibrary),
                       "install a driver of 2018 or later"};
    return;
  }
  if (const Return result = functions_->init(); result != Return::kSuccess) problem_ = problem_of(result);
}

Problem Nvml::problem_of(Return result) const {
  switch (result) {
    case Return::kDriverNotLoaded: return {"the driver is not loaded", "modprobe nvidia; in docker: --gpus all"};
    case Return::kLibRmVersionMismatch: return {"driver library and module versions differ", "reboot or reload nvidia"};
    case Return::kNoPermission: return {"no permission", "check who may open /dev/nvidiactl, /dev/nvidia0, …"};
    case Return::kGpuNotFound: return {"the driver finds none", "look into lspci and dmesg"};
    case Return::kLibraryNotFound: return {"a library of the driver is missing", "install the driver anew"};
    case Return::kGpuIsLost:
      return {"lost: the card has fallen off the bus", "look for Xid in dmesg; it takes a reboot, or new hardware"};
    case Return::kResetRequired:
      return {"the card needs a reset", "end its processes and run nvidia-smi --gpu-reset, or reboot"};
    case Return::kInsufficientPower: return {"the card's power cables are not attached", "attach them"};
    case Return::kIrqIssue: return {"the kernel has trouble with the card's interrupts", "look into dmesg"};
    case Return::kOperatingSystem:
      return {"the operating system blocks the card", "check the control group's device rules"};
    default: break;
  }
  const char* text = functions_ && functions_->error_string != nullptr ? functions_->error_string(result) : nullptr;
  return {fmt::format("NVML error {}{}{}", static_cast<int>(result), text != nullptr ? ": " : "",
                      text != nullptr ? text : ""),
          "look into dmesg"};
}

}  // namespace lockstep::devices
