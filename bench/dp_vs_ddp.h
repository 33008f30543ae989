// One process for all devices against a process for each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/timings.h"
#include "lockstep/trainer/config.h"

namespace lockstep::bench {

struct DpVsDdpOptions {
  trainer::TrainConfig
      train;                // without `data`: synthetic samples; without a list of devices: two CPU devices, all GPUs
  std::int64_t steps = 20;  // measured, per mode and round
  std::int64_t warmup_steps = 5;
  std::int64_t rounds = 3;
  Format format = Format::kTable;
  bool loss_outside = false;  // for measure_mode(), of one process: the loss is that of the gathered outputs
};

/// What a device had to do in a mode. A step is as long as the slowest process's.
struct DeviceShare {
  std::int64_t peak_memory_bytes = 0;  // its allocator's, and of the arena that its gradients lie in
  std::optional<double> busy;  // share of the time: of its thread's CPU, on a GPU that a kernel ran; absent: not known
  double bytes_in = 0, bytes_out = 0;  // a step, from and to the other devices
  void members(auto& io) {
    io("peak_memory_bytes", peak_memory_bytes, "busy", busy, "bytes_in", bytes_in, "bytes_out", bytes_out);
  }
};

struct ModeResult {
  double step_ms = 0;  // median
  double samples_per_s = 0;
  std::vector<DeviceShare> devices;
};

/// One mode in one round.
struct MeasuredMode {
  ModeResult mode;  // without samples_per_s
  std::string device;
  int threads = 1;
  void members(auto& io) { io("step_ms", mode.step_ms, "device", device, "threads", threads, "devices", mode.devices); }
};

struct DpVsDdpResult {
  std::string model, device;         // for people
  std::vector<std::string> devices;  // "cpu:0"
  std::int64_t global_batch = 0, steps = 0, rounds = 0;
  int threads = 1;  // a device
  ModeResult dp_loss_outside, dp, ddp;
};

/// Largest divided by smallest; absent where a device's is not known.
std::optional<double> memory_ratio(const ModeResult& mode);
std::optional<double> busy_ratio(const ModeResult& mode);

/// JSON, or a table.
std::string text_of(const DpVsDdpResult& result, Format format);

/// Measures steps over one batch that stays, shared out over the devices in each mode: by one process
/// (parallel::DataParallel), with the loss of the gathered outputs and with that inside the replicas, and by a process
/// for each device (DistributedDataParallel). The three alternate, `rounds` times, each in processes of its own, so
/// that neither finds the other's memory; medians over the rounds count, of memory the largest. Starts these processes
/// itself: under a launcher it is a UsageError. Returns the exit code.
int bench_dp_vs_ddp(DpVsDdpOptions options, const std::optional<UsageError>& refusal);

/// The figures of one mode, in the process or the processes that train in it: the first one's text is that of a
/// MeasuredMode, that of the others empty.
std::string measure_mode(const DpVsDdpOptions& options);

}  // namespace lockstep::bench
