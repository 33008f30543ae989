// What --device asks for. Pure.
#pragma once

#include <string>
#include <vector>

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

}  // namespace lockstep::session
