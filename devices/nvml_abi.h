// The part of NVML's binary interface that is used here, after NVIDIA's "NVML API Reference Guide". Declared here, so
// that building takes no NVIDIA package. Values and layouts are the library's and never change; a changed layout gets a
// function with another suffix.
#pragma once

#include <cstdint>

namespace lockstep::devices::nvml {

inline constexpr const char* kLibrary = "libnvidia-ml.so.1";

enum class Return : int {
  kSuccess = 0,
  kNotSupported = 3,
  kNoPermission = 4,
  kNotFound = 6,
  kInsufficientSize = 7,
  kInsufficientPower = 8,
  kDriverNotLoaded = 9,
  kIrqIssue = 11,
  kLibraryNotFound = 12,
  kFunctionNotFound = 13,
  kGpuIsLost = 15,
  kResetRequired = 16,
  kOperatingSystem = 17,
  kLibRmVersionMismatch = 18,
  kGpuNotFound = 28,
  kUnknown = 999,
};

using Device = struct OpaqueDevice*;

struct PciInfo {
  char bus_id_legacy[16];
  unsigned domain, bus, device;
  unsigned pci_device_id, pci_subsystem_id;
  char bus_id[32];  // "00000000:1B:00.0"
};
static_assert(sizeof(PciInfo) == 68);

struct MemoryV1 {
  std::uint64_t total, free, used;
};
static_assert(sizeof(MemoryV1) == 24);

struct MemoryV2 {
  unsigned version;
  std::uint64_t total, reserved, free, used;
};
static_assert(sizeof(MemoryV2) == 40);

struct Utilization {
  unsigned gpu, memory;  // percent
};

struct TemperatureV1 {
  unsigned version;
  unsigned sensor;
  int temperature;
};
static_assert(sizeof(TemperatureV1) == 12);

struct ProcessV1 {
  unsigned pid;
  std::uint64_t used_memory;
};
static_assert(sizeof(ProcessV1) == 16);

struct ProcessV2 {  // of the functions _v2 and _v3
  unsigned pid;
  std::uint64_t used_memory;
  unsigned gpu_instance, compute_instance;
};
static_assert(sizeof(ProcessV2) == 24);

enum class PeerCapability : int { kRead = 0, kNvlink = 2 };

enum class PeerStatus : int {
  kOk = 0,
  kChipset = 1,   // the chipset does not support it
  kGpu = 2,       // nor one of the cards
  kTopology = 3,  // nor the bridges between them
  kDisabled = 4,  // a parameter of the driver's module forbids it
  kNotSupported = 5,
  kUnknown = 6
};

/// Of a card's connections to others or to switches.
inline constexpr unsigned kMostNvlinks = 18;

// Why a card's clocks are lower than they could be: bits of nvmlDeviceGetCurrentClocksEventReasons.
inline constexpr std::uint64_t kSlowedByHardware = 0x8, kSlowedByHeatInSoftware = 0x20, kSlowedByHeat = 0x40,
                               kSlowedByPowerBrake = 0x80;

/// What a structure's field `version` must hold.
template <class Struct>
constexpr unsigned struct_version(unsigned version) {
  return static_cast<unsigned>(sizeof(Struct)) | (version << 24);
}

inline constexpr std::uint64_t kNotAvailable = ~std::uint64_t{0};
inline constexpr unsigned kGpuSensor = 0;
inline constexpr unsigned kUnknownPerformanceState = 32;
inline constexpr unsigned kUncorrectedErrors = 1;
inline constexpr unsigned kSinceDriverLoaded = 0;

}  // namespace lockstep::devices::nvml
