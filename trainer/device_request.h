// What --device asks for. Pure.
#pragma once

#include <string>
#include <vector>

namespace lockstep::trainer {

struct DeviceRequest {
  enum class Kind {
    kAuto,  // GPUs where every rank can have one of its own, else the CPU
    kCpu,
    kCuda,
  };
  Kind kind = Kind::kAuto;
  std::vector<int> indices;  // cuda:0,3: CUDA's, one for each rank of a host; empty: all of them in their order
  bool most_free = false;    // cuda:free: those with most free memory
};

/// Reads "auto", "cpu", "cuda", "cuda:0,3" or "cuda:free". Throws UsageError for anything else.
DeviceRequest parse_device(const std::string& text);

}  // namespace lockstep::trainer
