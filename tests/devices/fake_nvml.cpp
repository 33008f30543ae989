// Stands in for NVIDIA's management library: answers from a recording, the JSON file that LOCKSTEP_TEST_NVML names.
//
// The recording has "nvmlInit_v2" and other answers of the library as a whole, and under "devices" one object a card,
// in which MIG devices stand under "mig" by index. A process may stand for all ids up to its "to_pid". Keys are the
// names of functions; a number under "return" in place of an answer is an error code. What a recording does not mention
// is not supported. As the real library does, it refuses structures of another version, buffers that are too small and
// calls before nvmlInit_v2.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "devices/nvml_abi.h"

namespace {

using lockstep::devices::nvml::Device;
using lockstep::devices::nvml::MemoryV1;
using lockstep::devices::nvml::MemoryV2;
using lockstep::devices::nvml::PciInfo;
using lockstep::devices::nvml::ProcessV1;
using lockstep::devices::nvml::ProcessV2;
using lockstep::devices::nvml::TemperatureV1;
using lockstep::devices::nvml::Utilization;
using Json = nlohmann::json;

constexpr int kSuccess = 0, kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6,
              kInsufficientSize = 7, kVersionMismatch = 25;

Json recording;
int users = 0;  // calls of nvmlInit_v2 that have not been undone

const Json& card(Device device) { return *reinterpret_cast<const Json*>(device); }

/// The answer recorded in `place` under `name`, or the code to return in its place.
int find(const Json& place, const char* name, const Json*& answer) {
  if (users == 0) return kUninitialized;
  const auto at = place.find(name);
  if (at == place.end()) return kNotSupported;
  if (at->is_object() && at->contains("return")) return at->at("return");
  answer = &*at;
  return kSuccess;
}

template <class Fill>
int answer(const Json& place, const char* name, const Fill& fill) {
  const Json* found = nullptr;
  const int code = find(place, name, found);
  return code == kSuccess ? fill(*found) : code;
}

int number(const Json& place, const char* name, unsigned* out) {
  return answer(place, name, [&](const Json& value) {
    *out = value.get<unsigned>();
    return kSuccess;
  });
}

int copy(const std::string& from, char* out, unsigned size) {
  if (from.size() >= size) return kInsufficientSize;
  std::memcpy(out, from.c_str(), from.size() + 1);
  return kSuccess;
}

int text(const Json& place, const char* name, char* out, unsigned size) {
  return answer(place, name, [&](const Json& value) { return copy(value.get<std::string>(), out, size); });
}

int processes(Device device, const char* name, std::size_t entry_bytes, unsigned* count, std::byte* out) {
  return answer(card(device), name, [&](const Json& list) {
    std::vector<ProcessV2> entries;
    for (const auto& item : list) {
      const unsigned first = item.at("pid");
      for (unsigned pid = first; pid - first <= item.value("to_pid", first) - first; ++pid)
        entries.push_back({pid, item.value("usedGpuMemory", ~std::uint64_t{0}), item.value("gpuInstanceId", ~0u),
                           item.value("computeInstanceId", ~0u)});
    }
    const unsigned room = *count;
    *count = static_cast<unsigned>(entries.size());
    if (entries.size() > room) return kInsufficientSize;
    const std::size_t stride =
        entry_bytes == sizeof(ProcessV2) ? recording.value("entry_bytes", entry_bytes) : entry_bytes;
    for (const ProcessV2& entry : entries) {
      std::memset(out, 0, stride);
      std::memcpy(out, &entry, std::min(entry_bytes, sizeof entry));
      out += stride;
    }
    return kSuccess;
  });
}

}  // namespace

// The names are NVML's.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

int nvmlInit_v2() {
  const char* path = std::getenv("LOCKSTEP_TEST_NVML");
  std::ifstream file(path != nullptr ? path : "");
  recording = Json::parse(file, nullptr, false);
  if (recording.is_discarded()) return 999;
  const int code = recording.value("nvmlInit_v2", kSuccess);
  users += code == kSuccess ? 1 : 0;
  return code;
}

int nvmlShutdown() {
  if (users == 0) return kUninitialized;
  --users;
  return kSuccess;
}

/// Not NVML's: for tests.
int fake_nvml_users() { return users; }

const char* nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "Some Error"; }

int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return text(recording, "nvmlSystemGetDriverVersion", out, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int* out) {
  unsigned value = 0;
  const int code = number(recording, "nvmlSystemGetCudaDriverVersion_v2", &value);
  *out = static_cast<int>(value);
  return code;
}

int nvmlSystemGetProcessName(unsigned pid, char* out, unsigned size) {
  return answer(recording, "nvmlSystemGetProcessName", [&](const Json& names) {
    const auto at = names.find(std::to_string(pid));
    return at != names.end() ? copy(at->get<std::string>(), out, size) : kNotFound;
  });
}

int nvmlDeviceGetCount_v2(unsigned* out) {
  if (users == 0) return kUninitialized;
  if (recording.contains("nvmlDeviceGetCount_v2")) return number(recording, "nvmlDeviceGetCount_v2", out);
  *out = static_cast<unsigned>(recording.at("devices").size());
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* out) {
  if (users == 0) return kUninitialized;
  if (index >= recording.at("devices").size()) return kInvalidArgument;
  Json& device = recording["devices"][index];
  if (const int code = device.value("nvmlDeviceGetHandleByIndex_v2", kSuccess); code != kSuccess) return code;
  *out = reinterpret_cast<Device>(&device);
  return kSuccess;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device* out) {
  Json& mig = (*reinterpret_cast<Json*>(device))["mig"];
  const auto at = mig.find(std::to_string(index));
  if (at == mig.end()) return kNotFound;
  *out = reinterpret_cast<Device>(&*at);
  return kSuccess;
}

int nvmlDeviceGetName(Device device, char* out, unsigned size) {
  return text(card(device), "nvmlDeviceGetName", out, size);
}
int nvmlDeviceGetUUID(Device device, char* out, unsigned size) {
  return text(card(device), "nvmlDeviceGetUUID", out, size);
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo* out) {
  *out = {};
  return text(card(device), "nvmlDeviceGetPciInfo_v3", out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2* out) {
  if (out->version != 0x02000028) return kVersionMismatch;
  return answer(card(device), "nvmlDeviceGetMemoryInfo_v2", [&](const Json& value) {
    out->total = value.at("total");
    out->reserved = value.at("reserved");
    out->free = value.at("free");
    out->used = value.at("used");
    return kSuccess;
  });
}

int nvmlDeviceGetMemoryInfo(Device device, MemoryV1* out) {
  return answer(card(device), "nvmlDeviceGetMemoryInfo", [&](const Json& value) {
    *out = {value.at("total"), value.at("free"), value.at("used")};
    return kSuccess;
  });
}

int nvmlDeviceGetUtilizationRates(Device device, Utilization* out) {
  return answer(card(device), "nvmlDeviceGetUtilizationRates", [&](const Json& value) {
    *out = {value.at("gpu"), value.at("memory")};
    return kSuccess;
  });
}

int nvmlDeviceGetTemperatureV(Device device, TemperatureV1* out) {
  if (out->version != 0x0100000c) return kVersionMismatch;
  if (out->sensor != 0) return kInvalidArgument;
  return answer(card(device), "nvmlDeviceGetTemperatureV", [&](const Json& value) {
    out->temperature = value;
    return kSuccess;
  });
}

int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned* out) {
  return sensor == 0 ? number(card(device), "nvmlDeviceGetTemperature", out) : kInvalidArgument;
}

int nvmlDeviceGetEccMode(Device device, unsigned* current, unsigned* pending) {
  *pending = 0;
  return number(card(device), "nvmlDeviceGetEccMode", current);
}

int nvmlDeviceGetMigMode(Device device, unsigned* current, unsigned* pending) {
  *pending = 0;
  return number(card(device), "nvmlDeviceGetMigMode", current);
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, std::uint64_t* out) {
  if (type != 1 || counter != 0) return kInvalidArgument;
  return answer(card(device), "nvmlDeviceGetTotalEccErrors", [&](const Json& value) {
    *out = value;
    return kSuccess;
  });
}

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned* out) {
  return answer(card(device), "nvmlDeviceGetNvLinkState", [&](const Json& links) {
    if (link >= links.size()) return kInvalidArgument;
    *out = links[link];
    return kSuccess;
  });
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, std::uint64_t* out) {
  return answer(card(device), "nvmlDeviceGetCurrentClocksThrottleReasons", [&](const Json& value) {
    *out = value;
    return kSuccess;
  });
}

/// Of the first card: its answers by the second's name for the bus, capability read and NVLink; all others' are alike.
int nvmlDeviceGetP2PStatus(Device first, Device second, int capability, int* out) {
  if (capability != 0 && capability != 2) return kInvalidArgument;
  return answer(card(first), "nvmlDeviceGetP2PStatus", [&](const Json& value) {
    const std::string other = card(second).at("nvmlDeviceGetPciInfo_v3");
    const Json& both = value.contains(other) ? value.at(other) : value.at("others");
    *out = both.at(capability == 0 ? "read" : "nvlink");
    return kSuccess;
  });
}

#define NUMBER(name) \
  int name(Device device, unsigned* out) { return number(card(device), #name, out); }
NUMBER(nvmlDeviceGetPersistenceMode)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth)
NUMBER(nvmlDeviceGetDisplayActive)
NUMBER(nvmlDeviceGetFanSpeed)
NUMBER(nvmlDeviceGetPerformanceState)
NUMBER(nvmlDeviceGetPowerUsage)
NUMBER(nvmlDeviceGetEnforcedPowerLimit)
NUMBER(nvmlDeviceGetPowerManagementLimit)
NUMBER(nvmlDeviceGetComputeMode)
NUMBER(nvmlDeviceGetMaxMigDeviceCount)
NUMBER(nvmlDeviceGetGpuInstanceId)
NUMBER(nvmlDeviceGetComputeInstanceId)
#undef NUMBER

#define PROCESSES(name, Entry)                                  \
  int name(Device device, unsigned* count, std::byte* out) {    \
    return processes(device, #name, sizeof(Entry), count, out); \
  }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, ProcessV2)
PROCESSES(nvmlDeviceGetComputeRunningProcesses, ProcessV1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, ProcessV2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, ProcessV1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, ProcessV2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, ProcessV1)
#undef PROCESSES

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
