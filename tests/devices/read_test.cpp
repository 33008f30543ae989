#include "devices/nvml.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "devices/machine.h"
#include "tests/devices/recorded.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::devices {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::library_users;
using ::testing::Optional;
using testing::recorded_gpus;
using testing::recorded_symbols;

constexpr std::int64_t kMiB = 1 << 20;

std::string process_text(const GpuProcess& p) {
  return fmt::format("{}{} {} {} {}", p.mig ? fmt::format("{}: ", *p.mig) : "", p.pid, p.type,
                     p.memory_bytes ? fmt::to_string(*p.memory_bytes / kMiB) : "-", p.name.value_or("-"));
}
std::vector<std::string> process_texts(const Gpu& gpu) {
  std::vector<std::string> texts;
  for (const auto& process : gpu.processes) texts.push_back(process_text(process));
  return texts;
}

/// Functions that came after driver 470.
const std::set<std::string> kNewer = {
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
};

TEST(ReadGpus, EveryField) {
  const Gpus gpus = recorded_gpus("one_gpu");
  EXPECT_FALSE(gpus.problem);
  EXPECT_EQ(gpus.driver_version, "570.124.06");
  EXPECT_EQ(gpus.cuda_version, "12.8");
  ASSERT_EQ(gpus.list.size(), 1u);
  const Gpu& gpu = gpus.list[0];
  EXPECT_EQ(gpu.index, 0);
  EXPECT_FALSE(gpu.problem);
  EXPECT_THAT(gpu.denied, IsEmpty());
  EXPECT_EQ(gpu.name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(gpu.uuid, "GPU-89320000-d72c-4106-c12f-20bd9faed9f0");
  EXPECT_EQ(gpu.bus_id, "0000:1b:00.0");
  EXPECT_EQ(gpu.numa_node, std::nullopt);
  EXPECT_EQ(gpu.persistence, true);
  EXPECT_EQ(gpu.display, false);
  EXPECT_EQ(gpu.ecc, true);
  EXPECT_EQ(gpu.ecc_errors, 0);
  EXPECT_EQ(gpu.fan_percent, std::nullopt);
  EXPECT_EQ(gpu.temperature_c, 54);
  EXPECT_EQ(gpu.performance_state, 0);
  EXPECT_EQ(gpu.power_w, 612.345);
  EXPECT_EQ(gpu.power_cap_w, 700.0);
  ASSERT_TRUE(gpu.memory);
  EXPECT_EQ(gpu.memory->total_bytes, 81559 * kMiB);
  EXPECT_EQ(gpu.memory->free_bytes, 12344 * kMiB);
  EXPECT_EQ(gpu.memory->used_bytes, 68664 * kMiB);
  EXPECT_EQ(gpu.memory->reserved_bytes, 551 * kMiB);
  EXPECT_EQ(gpu.utilisation_percent, 97);
  EXPECT_EQ(gpu.memory_utilisation_percent, 61);
  EXPECT_EQ(gpu.compute_mode, ComputeMode::kDefault);
  EXPECT_EQ(gpu.mig, false);
  EXPECT_THAT(process_texts(gpu), ElementsAre("28413 C 68650 /usr/local/bin/lockstep"));
}

TEST(ReadGpus, TheNumaNodeIsTheBusIds) {
  const lockstep::testing::TemporaryDirectory sysfs;
  const auto write = [&](const std::string& id, const char* text) {
    sysfs.write("bus/pci/devices/" + id + "/numa_node", text);
  };
  write("0000:1b:00.0", "0\n");
  write("0000:2b:00.0", "-1\n");  // a machine without NUMA
  write("0000:3b:00.0", "7\n");
  const Gpus gpus = recorded_gpus("eight_gpus", {}, sysfs.path());
  EXPECT_EQ(gpus.list[0].numa_node, 0);
  EXPECT_EQ(gpus.list[1].numa_node, std::nullopt);
  EXPECT_EQ(gpus.list[2].numa_node, 7);
  EXPECT_EQ(gpus.list[3].numa_node, std::nullopt);
}

TEST(ReadGpus, ProcessesOfAllKindsOnce) {
  const Gpus gpus = recorded_gpus("eight_gpus");
  ASSERT_EQ(gpus.list.size(), 8u);
  EXPECT_THAT(process_texts(gpus.list[3]),
              ElementsAre("77 M+C 30 nvidia-cuda-mps-server", "512 G 4 -", "9001 C+G 64 /usr/bin/Xorg",
                          "40003 C 3990 build/lockstep", "4194303 C - -"));
  EXPECT_THAT(process_texts(gpus.list[7]), ElementsAre("40007 C 7990 build/lockstep"));
}

TEST(ReadGpus, OlderDriversOlderFunctions) {
  const Gpus gpus = recorded_gpus("tells_little", kNewer);
  EXPECT_EQ(gpus.cuda_version, "11.4");
  ASSERT_EQ(gpus.list.size(), 2u);
  const Gpu& gpu = gpus.list[0];
  ASSERT_TRUE(gpu.memory);
  EXPECT_EQ(gpu.memory->used_bytes, 500 * kMiB);
  EXPECT_EQ(gpu.memory->reserved_bytes, std::nullopt);
  EXPECT_EQ(gpu.temperature_c, 41);
  EXPECT_EQ(gpu.fan_percent, 35);
  EXPECT_EQ(gpu.performance_state, std::nullopt);  // "unknown", which is no state
  EXPECT_EQ(gpu.power_w, std::nullopt);
  EXPECT_EQ(gpu.mig, std::nullopt);
  EXPECT_THAT(process_texts(gpu), ElementsAre("1234 C 300 python3"));
}

TEST(ReadGpus, SilentGpuIsStillListed) {
  const Gpus gpus = recorded_gpus("tells_little");
  const Gpu& gpu = gpus.list[1];
  EXPECT_FALSE(gpu.problem);
  EXPECT_THAT(gpu.denied, IsEmpty());
  EXPECT_FALSE(gpu.name || gpu.uuid || gpu.bus_id || gpu.memory || gpu.ecc || gpu.compute_mode);
  EXPECT_THAT(gpu.processes, IsEmpty());
}

TEST(ReadGpus, EntriesThatSomeDriversMakeWider) {
  const Gpus gpus = recorded_gpus("wide_entries");
  EXPECT_THAT(process_texts(gpus.list[0]), ElementsAre("100 C 1 a", "200 C 2 b", "300 C 3 c"));
}

TEST(ReadGpus, MoreProcessesThanTheFirstGuess) {
  EXPECT_EQ(recorded_gpus("many_processes").list[0].processes.size(), 500u);
  EXPECT_EQ(recorded_gpus("many_processes", kNewer).list[0].processes.size(), 300u);
}

TEST(ReadGpus, WhatIsBetweenThem) {
  const Gpus gpus = recorded_gpus("links");
  ASSERT_EQ(gpus.list.size(), 3u);
  EXPECT_EQ(gpus.list[0].pcie_width, 8);
  EXPECT_EQ(gpus.list[0].most_pcie_width, 16);
  EXPECT_EQ(gpus.list[0].nvlinks_up, 3);
  EXPECT_EQ(gpus.list[0].nvlinks_down, 1);
  EXPECT_EQ(gpus.list[1].nvlinks_up + gpus.list[1].nvlinks_down, 0);
  EXPECT_THAT(gpus.list[0].slowed_by, ElementsAre("heat"));
  EXPECT_THAT(gpus.list[1].slowed_by, IsEmpty()) << "a cap of power is no fault";
  EXPECT_THAT(gpus.list[2].slowed_by, ElementsAre("power brake"));
  std::vector<std::string> pairs;
  for (const GpuPair& pair : gpus.pairs)
    pairs.push_back(fmt::format("{} {}: {}{}", pair.first, pair.second,
                                pair.reads.value_or(false) ? "reads" : pair.reason.value_or("?"),
                                pair.nvlink ? " by NVLink" : ""));
  EXPECT_THAT(pairs, ElementsAre("0 1: reads by NVLink", "0 2: what lies between their slots does not support it",
                                 "1 2: reads"));
}

TEST(ReadGpus, MigDevices) {
  const Gpus gpus = recorded_gpus("mig");
  ASSERT_EQ(gpus.list.size(), 3u);
  const Gpu& gpu = gpus.list[0];
  EXPECT_EQ(gpu.mig, true);
  EXPECT_FALSE(gpu.memory);
  EXPECT_THAT(gpu.denied, ElementsAre("memory"));
  ASSERT_EQ(gpu.mig_devices.size(), 2u);
  const MigDevice& second = gpu.mig_devices[1];
  EXPECT_EQ(second.index, 2);
  EXPECT_EQ(second.name, "NVIDIA A100-SXM4-80GB MIG 1g.10gb");
  EXPECT_EQ(second.uuid, "MIG-11b2c3d4-0000-5000-8000-000000000001");
  EXPECT_EQ(second.gpu_instance, 9);
  EXPECT_EQ(second.compute_instance, 0);
  EXPECT_EQ(second.memory.value().total_bytes, 9728 * kMiB);
  EXPECT_THAT(process_texts(gpu), ElementsAre("0: 5151 C 37 train_a", "2: 5151 C 1 train_a", "2: 5152 C 17 train_b"));
  EXPECT_EQ(gpus.list[1].mig, true);
  EXPECT_THAT(gpus.list[1].mig_devices, IsEmpty());
  EXPECT_EQ(gpus.list[2].mig, false);
}

TEST(ReadGpus, CardsThatFailDoNotFailTheOthers) {
  const Gpus gpus = recorded_gpus("trouble");
  ASSERT_EQ(gpus.list.size(), 7u);
  const auto problem = [&](std::size_t i) { return gpus.list[i].problem ? gpus.list[i].problem->what : "none"; };
  EXPECT_EQ(problem(0), "none");
  EXPECT_THAT(problem(1), HasSubstr("lost"));
  EXPECT_THAT(problem(2), HasSubstr("lost"));  // while it was being read
  EXPECT_EQ(gpus.list[2].bus_id, "0000:3b:00.0");
  EXPECT_FALSE(gpus.list[2].compute_mode);
  EXPECT_THAT(problem(3), HasSubstr("reset"));
  EXPECT_TRUE(gpus.list[3].memory);
  EXPECT_THAT(problem(4), HasSubstr("permission"));
  EXPECT_THAT(problem(5), HasSubstr("999: Unknown Error"));
  EXPECT_EQ(problem(6), "none");
  EXPECT_THAT(gpus.list[6].denied, ElementsAre("power", "processes"));
  EXPECT_TRUE(gpus.list[6].power_cap_w);
  for (const auto& gpu : gpus.list) EXPECT_TRUE(!gpu.problem || !gpu.problem->remedy.empty()) << gpu.problem->what;
}

TEST(ReadGpus, ImpossibleNumbersAreNotReported) {
  const Gpus gpus = recorded_gpus("long_names");
  EXPECT_EQ(gpus.list[0].power_w, std::nullopt);
  EXPECT_EQ(gpus.list[0].bus_id, "abcd:1b:00.0");
}

TEST(ReadGpus, ChoosingAsksForLess) {
  const Nvml nvml(recorded_symbols("one_gpu"));
  const Gpus gpus = read_gpus(nvml, Detail::kChoice);
  EXPECT_TRUE(gpus.list[0].memory && gpus.list[0].uuid && gpus.list[0].compute_mode);
  EXPECT_FALSE(gpus.list[0].temperature_c);
  EXPECT_THAT(gpus.list[0].processes, IsEmpty());
}

TEST(Nvml, SaysWhyItCannotBeUsed) {
  const auto problem = [](const char* recording, const std::set<std::string>& missing = {}) {
    return recorded_gpus(recording, missing).problem.value_or(Problem{});
  };
  EXPECT_THAT(problem("driver_not_loaded").what, HasSubstr("not loaded"));
  EXPECT_THAT(problem("driver_not_loaded").remedy, HasSubstr("modprobe nvidia"));
  EXPECT_THAT(problem("version_mismatch").what, HasSubstr("versions differ"));
  EXPECT_THAT(problem("version_mismatch").remedy, HasSubstr("reboot"));
  EXPECT_THAT(problem("one_gpu", {"nvmlInit_v2"}).what, HasSubstr("older than"));
  EXPECT_EQ(problem("no_gpus").what, "");
}

TEST(Nvml, LeavesTheLibraryAsItWas) {
  {
    const Nvml nvml(recorded_symbols("one_gpu"));
    EXPECT_EQ(library_users(), 1);
  }
  EXPECT_EQ(library_users(), 0);
  { const Nvml nvml(recorded_symbols("driver_not_loaded")); }
  EXPECT_EQ(library_users(), 0);
}

TEST(ReadCpu, AgreesWithTheSystem) {
  const Cpu cpu = read_cpu();
  ASSERT_TRUE(cpu.processors && cpu.usable_processors && cpu.memory_bytes);
  EXPECT_EQ(*cpu.processors, ::sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_GE(*cpu.usable_processors, 1);
  EXPECT_LE(*cpu.usable_processors, *cpu.processors);
  EXPECT_GE(*cpu.memory_bytes, std::int64_t{1} << 28);
  EXPECT_LE(cpu.sockets.value_or(1), cpu.cores.value_or(1));
  EXPECT_LE(cpu.cores.value_or(1), *cpu.processors);
}

TEST(ReadCpu, FeaturesBuildOnEachOther) {
  const CpuFeatures has = cpu_features();
  EXPECT_TRUE(!has.avx512 || has.avx2);
  EXPECT_TRUE(has.avx512 || !(has.avx512_vnni || has.avx512_bf16 || has.avx512_fp16));
  EXPECT_EQ(cpu_instruction_set() == "avx512_amx", has.avx512 && has.amx_bf16);
}

}  // namespace

}  // namespace lockstep::devices
