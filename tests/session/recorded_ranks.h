// Ranks on machines that recordings of NVML describe.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "devices/visible.h"
#include "session/device_view.h"
#include "tests/devices/recorded.h"

namespace lockstep::session::testing {

/// CUDA_VISIBLE_DEVICES is `variable`, or not set; nothing else is.
inline EnvLookup visible_devices(const std::optional<std::string>& variable) {
  return [variable](const std::string& name) {
    return name == "CUDA_VISIBLE_DEVICES" ? variable : std::optional<std::string>();
  };
}

/// What CUDA shows a process of the GPUs, in NVML's order. Where there are MIG devices it is the first one alone.
inline CudaProbe cuda_of(const devices::Gpus& gpus, const std::optional<std::string>& variable = std::nullopt) {
  CudaProbe cuda;
  cuda.built = true;
  cuda.runtime_version = cuda.driver_version = 13000;
  auto visible = devices::visible_gpus(gpus, visible_devices(variable));
  const auto mig = std::ranges::find_if(visible, [](const auto& device) { return device.mig.has_value(); });
  if (mig != visible.end()) visible = {*mig};
  for (const auto& device : visible) {
    std::string id = *gpus.list[static_cast<std::size_t>(device.gpu)].bus_id;
    cuda.bus_ids.push_back(id);
  }
  cuda.devices = static_cast<int>(visible.size());
  if (cuda.devices == 0) {
    cuda.problem = "no GPU is visible to this process";
    cuda.remedy = "look at CUDA_VISIBLE_DEVICES";
  }
  return cuda;
}

inline VisibleGpus visible_to(const devices::Gpus& gpus, const std::optional<std::string>& variable = std::nullopt,
                              const std::string& machine = "m") {
  return list_visible_gpus(cuda_of(gpus, variable), gpus, visible_devices(variable), machine);
}

}  // namespace lockstep::session::testing
