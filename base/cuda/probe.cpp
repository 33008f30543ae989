#include "base/cuda/library.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace lockstep {
namespace {

/// CUDA writes "0000:1B:00.0".
std::string bus_id_of(int device) {
  std::array<char, 32> text{};
  if (cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  std::string id(text.data());
  std::ranges::transform(id, id.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return id;
}

CudaProbe ask() {
  CudaProbe probe;
  probe.built = true;
  cudaRuntimeGetVersion(&probe.runtime_version);
  if (cudaDriverGetVersion(&probe.driver_version) != cudaSuccess) probe.driver_version = 0;
  const cudaError_t status = cudaGetDeviceCount(&probe.devices);
  if (status == cudaSuccess && probe.devices > 0) {
    for (int device = 0; device < probe.devices; ++device) probe.bus_ids.push_back(bus_id_of(device));
    return probe;
  }
  probe.devices = 0;
  static_cast<void>(cudaGetLastError());  // it has been heard
  if (probe.driver_version == 0) {
    probe.problem = "no NVIDIA driver is loaded";
    probe.remedy = "install NVIDIA's driver, or use --device cpu";
  } else if (status == cudaErrorInsufficientDriver || probe.driver_version / 1000 < probe.runtime_version / 1000) {
    probe.problem = fmt::format("the NVIDIA driver runs CUDA up to {}, this program needs {}",
                                cuda_version_text(probe.driver_version), cuda_version_text(probe.runtime_version));
    // NVIDIA's CUDA release notes, "CUDA Toolkit and Minimum Required Driver Versions".
    probe.remedy =
        fmt::format("install driver {} or newer, or use --device cpu", probe.runtime_version / 1000 == 12 ? 525 : 580);
  } else if (status == cudaErrorNoDevice || status == cudaSuccess) {
    probe.problem = "no GPU is visible to this process";
    probe.remedy = "look at CUDA_VISIBLE_DEVICES and at what the container or job was given, or use --device cpu";
  } else if (status == cudaErrorSystemNotReady) {  // while nvidia-smi shows all GPUs
    probe.problem = "CUDA does not start: the links between this machine's GPUs are not ready";
    probe.remedy = "start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager), or use --device cpu";
  } else {
    probe.problem = fmt::format("CUDA does not start: {}", cudaGetErrorString(status));
    probe.remedy = "see whether nvidia-smi works, or use --device cpu";
  }
  return probe;
}

}  // namespace

const CudaProbe& probe_cuda() {
  static const CudaProbe probe = ask();
  return probe;
}

std::string current_cuda_bus_id() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return bus_id_of(device);
  static_cast<void>(cudaGetLastError());
  return {};
}

}  // namespace lockstep
