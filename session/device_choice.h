// What --device asks for, and which rank computes on which device. Pure.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/device.h"
#include "session/device_view.h"

namespace lockstep::session {

struct DeviceRequest {
  enum class Kind {
    kAuto,  // GPUs where every rank can have one of its own, else the CPU
    kCpu,
    kCuda,
  };
  Kind kind = Kind::kAuto;
  // cuda:0,3: CUDA's numbers, cpu:0,1: those of CPU devices (parallel::Devices); one for each rank of a host, or for
  // one that computes on all of them. Empty: all GPUs in their order, or one CPU device per rank.
  std::vector<int> indices;
  bool most_free = false;  // cuda:free: those with most free memory
};

/// Reads "auto", "cpu", "cpu:0,1", "cuda", "cuda:0,3" or "cuda:free". Throws UsageError for anything else.
DeviceRequest parse_device(const std::string& text);

/// Throws UsageError for a CPU device that is not among those that are named: of two they are 0 and 1, in any order.
/// `device` is what `request` was read from.
void check_cpu_numbers(const std::string& device, const DeviceRequest& request);

/// Throws UsageError with `remedy` where the list of devices has one twice.
void check_named_once(const std::string& device, const DeviceRequest& request, const std::string& remedy);

struct DeviceChoice {
  Device device;
  VisibleGpu gpu;  // that device, if it is one
  std::vector<int> devices = {
      0};               // numbers of all that the rank computes on; the first is `device`, on the CPU its own
  std::string why_cpu;  // where `auto` came to the CPU
  bool tell = false;    // GPUs are there, and people may wonder
};

/// The device of rank `rank`, after what all ranks see (`ranks`, by rank): every rank comes to the same plan without
/// asking again.
///
/// The ranks of a machine that ask for the same and see the same GPUs take them in turn, in the order of their local
/// ranks: of `cuda` the first one GPU 0, of `cuda:0,3` the second one GPU 3, of `cuda:free` the first one the GPU that
/// it sees with most free memory. So where a launcher shows each rank a GPU of its own, each takes its index 0. `auto`
/// is `cuda` if that gives every rank that asks for it a GPU, and else the CPU for all of them.
///
/// A rank that computes on several devices (RankView::all_devices; it is the only one) takes all that it asks for: of
/// `cuda` all GPUs that it sees, of `cuda:free` the emptiest (devices::emptiest), the one with most free memory first.
///
/// Throws DeviceError if there is no such device or it takes no (more) processes, if there are more ranks than devices,
/// and if several ranks would compute on one GPU without `share`.
DeviceChoice choose_device(std::span<const RankView> ranks, int rank);

}  // namespace lockstep::session
