// What a machine has to compute with: plain data, as it was at one moment. Unknown values are absent. How it is read
// (GPUs: devices/nvml.h) and shown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu.h"

namespace lockstep::devices {

/// Why something could not be read, and what to do about it.
struct Problem {
  std::string what;
  std::string remedy;  // may be empty
};

struct Memory {
  std::int64_t total_bytes = 0;
  std::int64_t free_bytes = 0;
  std::int64_t used_bytes = 0;                 // by processes; with the reserved bytes where those are unknown
  std::optional<std::int64_t> reserved_bytes;  // by driver and firmware
};

/// A process with a context on a GPU, or on one of its MIG devices.
struct GpuProcess {
  std::int64_t pid = 0;  // as the driver sees it, which in a container may be the host's
  std::string type;      // "C" computes, "G" draws, "C+G" both, "M+C" computes through the multi-process service
  std::optional<std::string> name;
  std::optional<std::int64_t> memory_bytes;
  std::optional<int> mig;  // index of the MIG device
};

/// A part of a GPU that is a device of its own.
struct MigDevice {
  int index = 0;  // on its GPU
  std::optional<std::string> name, uuid;
  std::optional<int> gpu_instance, compute_instance;
  std::optional<Memory> memory;
};

enum class ComputeMode { kDefault, kExclusiveThread, kProhibited, kExclusiveProcess };

struct Gpu {
  int index = 0;  // NVML's, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID

  /// The card does not answer, or stopped to while it was being read. What is known of it stands below all the same.
  std::optional<Problem> problem;
  /// What this user may not read: "memory", "processes".
  std::vector<std::string> denied;

  std::optional<std::string> name, uuid;
  std::optional<std::string> bus_id;  // as in /sys/bus/pci/devices: "0000:1b:00.0"
  std::optional<int> numa_node;
  std::optional<bool> persistence, display;
  std::optional<bool> ecc;
  std::optional<std::int64_t> ecc_errors;  // that were not corrected, since the driver was loaded
  std::optional<int> fan_percent;
  std::optional<int> temperature_c;
  std::optional<int> performance_state;  // 0, the fastest, to 15
  std::optional<double> power_w, power_cap_w;
  std::optional<Memory> memory;
  std::optional<int> utilisation_percent;         // of the time: a kernel was running
  std::optional<int> memory_utilisation_percent;  // of the time: memory was read or written
  std::optional<ComputeMode> compute_mode;
  std::optional<bool> mig;  // split into MIG devices
  std::vector<MigDevice> mig_devices;
  std::vector<GpuProcess> processes;
  std::optional<int> pcie_width, most_pcie_width;  // now, and of the card and its slot
  std::vector<std::string> slowed_by;              // now: "heat", "power brake", "its hardware"
  int nvlinks_up = 0, nvlinks_down = 0;
};

/// Two GPUs of a machine, `first` < `second`.
struct GpuPair {
  int first = 0, second = 0;          // Gpu::index
  std::optional<bool> reads;          // the one the other's memory, without the host
  std::optional<std::string> reason;  // why not
  bool nvlink = false;
};

struct Gpus {
  std::optional<Problem> problem;  // why there is no list
  std::optional<std::string> driver_version;
  std::optional<std::string> cuda_version;  // the newest that the driver runs: "12.8"
  std::vector<Gpu> list;
  std::vector<GpuPair> pairs = {};  // all of them, where they were asked for
};

struct Cpu {
  std::optional<std::string> model;
  std::optional<int> sockets, cores, numa_nodes;
  std::optional<int> processors;         // hardware threads
  std::optional<int> usable_processors;  // those that this process may run on
  std::optional<std::int64_t> memory_bytes;
  CpuFeatures features;
};

/// Measured rates of a device for memory alone and for matrix products alone.
struct MeasuredRates {
  struct Product {
    std::string precision;   // "bf16", "tf32", "f32"
    std::int64_t width = 0;  // of its three matrices, which are square
    double tflops = 0;       // 10^12 operations per second, 2 for each multiply-add
  };
  std::string device;                   // "cpu", or "cuda:0", CUDA's number among those that this process may see
  std::optional<Problem> problem = {};  // why something is missing
  std::optional<int> threads = {};      // of the CPU
  std::int64_t copy_bytes = 0;          // of the array that was copied
  std::optional<double> copy_bytes_per_s = {};  // within its memory, reads and writes together
  std::vector<Product> products = {};
  std::optional<double> core_flops = {};  // of the CPU: f32 operations per second of one core, 2 for each multiply-add

  std::optional<double> product_tflops(std::string_view precision) const;
};

struct Machine {
  Gpus gpus;
  Cpu cpu;
  std::vector<MeasuredRates> measured = {};  // where that was asked for
};

/// As hwloc and CPUID see them, all of the machine whatever part of it this process may use. Never throws over what
/// the system hides: that is absent.
Cpu read_cpu();

// Pure:

/// One JSON object, a line without its newline. Units are in the names: bytes, percent, W, °C. Unknown values are null;
/// what was not measured is left out.
std::string json_of(const Machine& machine);

inline constexpr int kTableColumns = 80;

/// GPUs, their processes and the CPU, in a frame of kTableColumns; ends with a newline. Values that a card does not
/// report are "N/A"; sizes are in MiB. What was measured follows, one line or more for each device.
std::string table_of(const Machine& machine);

}  // namespace lockstep::devices
