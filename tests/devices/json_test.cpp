#include "devices/machine.h"

#include <gtest/gtest.h>

#include "tests/devices/recorded.h"
#include "tests/support/json.h"

namespace lockstep::devices {
namespace {

using testing::machine_with;
using testing::recorded_gpus;
using testing::recordings;
using Json = nlohmann::json;

Json parsed(const std::string& recording) {
  return lockstep::testing::json_in(json_of(machine_with(recorded_gpus(recording))));
}

TEST(Json, OfOneGpu) {
  const Json expected = lockstep::testing::json_in(R"({
    "driver_version": "570.124.06", "cuda_version": "12.8", "problem": null,
    "gpus": [{
      "index": 0, "problem": null, "no_permission": [], "name": "NVIDIA H100 80GB HBM3",
      "uuid": "GPU-89320000-d72c-4106-c12f-20bd9faed9f0", "bus_id": "0000:1b:00.0", "numa_node": null,
      "persistence": true, "display": false, "ecc": true, "ecc_uncorrected_errors": 0,
      "fan_percent": null, "temperature_c": 54, "performance_state": 0, "power_w": 612.345, "power_cap_w": 700.0,
      "utilisation_percent": 97, "memory_utilisation_percent": 61, "compute_mode": "default", "mig": false,
      "memory_total_bytes": 85520809984, "memory_free_bytes": 12943622144, "memory_used_bytes": 71999422464,
      "memory_reserved_bytes": 577765376, "pcie_width": null, "most_pcie_width": null,
      "slowed_by": [], "nvlinks_up": 0, "nvlinks_down": 0, "mig_devices": [],
      "processes": [{"pid": 28413, "type": "C", "name": "/usr/local/bin/lockstep", "memory_bytes": 71984742400,
                     "mig_device": null}]
    }],
    "gpu_pairs": [],
    "cpu": {
      "model": "AMD EPYC 9554 64-Core Processor", "sockets": 2, "cores": 128, "processors": 256,
      "usable_processors": 64, "numa_nodes": 2, "memory_bytes": 1621295628288,
      "features": {"avx2": true, "fma": true, "avx512": true, "avx512_vnni": true, "avx512_bf16": true,
                   "avx512_fp16": false, "amx_bf16": false, "amx_int8": false}
    }
  })");
  EXPECT_EQ(parsed("one_gpu"), expected);
}

TEST(Json, IsOneLineOfUtf8) {
  for (const auto& recording : recordings()) {
    const std::string text = json_of(machine_with(recorded_gpus(recording)));
    EXPECT_EQ(text.find('\n'), std::string::npos) << recording;
    EXPECT_TRUE(Json::accept(text)) << recording;
  }
  Gpus gpus = recorded_gpus("one_gpu");
  gpus.list[0].processes[0].name = "\xff\xfe no UTF-8";
  EXPECT_TRUE(Json::accept(json_of(machine_with(gpus))));
}

TEST(Json, HasWhatWasMeasured) {
  Machine machine = machine_with(recorded_gpus("one_gpu"));
  EXPECT_FALSE(Json::parse(json_of(machine)).contains("measured"));
  machine.measured = {
      {.device = "cuda:0", .copy_bytes = 1024, .copy_bytes_per_s = 4e12, .products = {{"bf16", 64, 7.5}}},
      {.device = "cpu", .problem = Problem{"no threads", ""}, .threads = 2}};
  EXPECT_EQ(Json::parse(json_of(machine))["measured"], Json::parse(R"([
    {"device": "cuda:0", "problem": null, "threads": null, "core_flops": null, "copy_bytes": 1024, "copy_bytes_per_s": 4e12,
     "products": [{"precision": "bf16", "width": 64, "tflops": 7.5}]},
    {"device": "cpu", "problem": {"what": "no threads", "remedy": ""}, "threads": 2, "copy_bytes": 0,
     "copy_bytes_per_s": null, "products": [], "core_flops": null}])"));
  EXPECT_EQ(machine.measured[0].product_tflops("bf16"), 7.5);
  EXPECT_FALSE(machine.measured[0].product_tflops("f32"));
}

TEST(Json, NamesAreNotAltered) {
  const Json gpu = parsed("long_names")["gpus"][0];
  EXPECT_EQ(gpu["name"], "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition");
  EXPECT_EQ(gpu["processes"][2]["name"], "evil\u001b[2Jname\nsecond line\t\u202etxt");
  EXPECT_EQ(gpu["compute_mode"], "exclusive_process");
}

TEST(Json, MigAndProblems) {
  const Json mig = parsed("mig");
  EXPECT_EQ(mig["gpus"][0]["mig_devices"][1]["gpu_instance"], 9);
  EXPECT_EQ(mig["gpus"][0]["mig_devices"][1]["memory_free_bytes"], std::int64_t{9603} << 20);
  EXPECT_EQ(mig["gpus"][0]["processes"][2]["mig_device"], 2);
  EXPECT_EQ(mig["gpus"][0]["no_permission"], Json({"memory"}));
  EXPECT_EQ(mig["gpus"][0]["memory_used_bytes"], nullptr);
  const Json trouble = parsed("trouble");
  EXPECT_NE(trouble["gpus"][1]["problem"]["what"].get<std::string>().find("lost"), std::string::npos);
  EXPECT_EQ(trouble["gpus"][1]["name"], nullptr);
  const Json none = parsed("driver_not_loaded");
  EXPECT_EQ(none["gpus"], Json::array());
  EXPECT_NE(none["problem"]["remedy"], "");
}

}  // namespace
}  // namespace lockstep::devices
