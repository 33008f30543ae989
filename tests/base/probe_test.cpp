#include "base/cuda/library.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep {
namespace {

// A process probes once: each machine gets a process of its own, which prints the results.
void tell(const soft_cuda::Machine& machine) {
  soft_cuda::set_machine(machine);
  const CudaProbe& probe = probe_cuda();
  std::fprintf(stderr, "%d devices, runtime %d, driver %d: <%s> <%s>\n", probe.devices, probe.runtime_version,
               probe.driver_version, probe.problem.c_str(), probe.remedy.c_str());
  std::exit(probe.built ? 0 : 1);
}

const auto kOk = ::testing::ExitedWithCode(0);

TEST(ProbeTest, CountsDevices) {
  EXPECT_EXIT(tell({.devices = 3}), kOk, "3 devices, runtime 13[0-9]+, driver 13000: <> <>");
}

TEST(ProbeTest, ReadsBusIds) {
  const auto tell_places = [] {
    soft_cuda::set_machine({.devices = 2});
    std::string text;
    for (const auto& id : probe_cuda().bus_ids) text += id + " ";
    cudaSetDevice(1);
    std::fprintf(stderr, "%sand of these %s\n", text.c_str(), current_cuda_bus_id().c_str());
    std::exit(0);
  };
  EXPECT_EXIT(tell_places(), kOk, "^0000:1b:00.0 0000:1c:00.0 and of these 0000:1c:00.0");
}

TEST(ProbeTest, NoBusIdsWithoutADriver) {
  const auto tell_place = [] {
    soft_cuda::set_machine({.driver_version = 0});
    std::fprintf(stderr, "%zu <%s>\n", probe_cuda().bus_ids.size(), current_cuda_bus_id().c_str());
    std::exit(0);
  };
  EXPECT_EXIT(tell_place(), kOk, "0 <>");
}

TEST(ProbeTest, NoDriver) {
  EXPECT_EXIT(tell({.driver_version = 0}), kOk,
              "0 devices, .* driver 0: <no NVIDIA driver is loaded> <install NVIDIA's driver, or use --device cpu>");
}

TEST(ProbeTest, DriverThatIsTooOld) {
  EXPECT_EXIT(tell({.driver_version = 12040}), kOk,
              "0 devices, .*: <the NVIDIA driver runs CUDA up to 12.4, this program needs 13.[0-9]+> <install driver "
              "580 or newer, or use --device cpu>");
}

TEST(ProbeTest, NoDeviceVisible) {
  EXPECT_EXIT(tell({.sees_devices = false}), kOk,
              "0 devices, .*: <no GPU is visible to this process> <look at CUDA_VISIBLE_DEVICES");
}

}  // namespace
}  // namespace lockstep
