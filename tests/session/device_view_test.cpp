#include "session/device_view.h"

#include <gmock/gmock.h>

#include "tests/session/recorded_ranks.h"

namespace lockstep::session {
namespace {

using devices::testing::recorded_gpus;
using testing::cuda_of;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::visible_devices;
using testing::visible_to;

std::vector<std::string> bus_ids(const VisibleGpus& visible) {
  std::vector<std::string> ids;
  for (const auto& gpu : visible.gpus) ids.push_back(gpu.bus_id);
  return ids;
}

TEST(ListVisibleGpus, NvmlDescribesThem) {
  const auto visible = visible_to(recorded_gpus("eight_gpus"));
  ASSERT_EQ(visible.gpus.size(), 8u);
  EXPECT_EQ(visible.gpus[1].id, "GPU-89321111-d72c-4106-c12f-20bd9faed9f1");
  EXPECT_EQ(visible.gpus[1].bus_id, "0000:2b:00.0");
  EXPECT_EQ(visible.gpus[1].free_bytes, 82845892608);
  EXPECT_FALSE(visible.gpus[1].prohibited);
  EXPECT_FALSE(visible.gpus[1].exclusive);
  EXPECT_EQ(to_string(visible.gpus[1], 1), "GPU 1 (NVIDIA H100 80GB HBM3, 0000:2b:00.0)");
  EXPECT_EQ(visible.problem, "");
  EXPECT_EQ(visible.memory_problem, "");
  EXPECT_TRUE(visible.machine_has_gpus);
}

TEST(ListVisibleGpus, OrderIsThatOfCuda) {
  const auto gpus = recorded_gpus("eight_gpus");
  EXPECT_THAT(bus_ids(visible_to(gpus, "2,0")), ElementsAre("0000:3b:00.0", "0000:1b:00.0"));
  // Whatever NVML makes of the variables: with CUDA_DEVICE_ORDER=FASTEST_FIRST its order is another.
  CudaProbe cuda = cuda_of(gpus, "0,1,2");
  std::ranges::reverse(cuda.bus_ids);
  const auto visible = list_visible_gpus(cuda, gpus, visible_devices("0,1,2"), "m");
  EXPECT_THAT(bus_ids(visible), ElementsAre("0000:3b:00.0", "0000:2b:00.0", "0000:1b:00.0"));
  EXPECT_EQ(visible.gpus[0].id, "GPU-89322222-d72c-4106-c12f-20bd9faed9f2");
}

TEST(ListVisibleGpus, BusIdsAreWrittenInSeveralFormats) {
  const auto gpus = recorded_gpus("eight_gpus");
  CudaProbe cuda = cuda_of(gpus, "0,1");
  cuda.bus_ids = {"00000000:1B:00.0", "0000:2B:00.0"};
  const auto visible = list_visible_gpus(cuda, gpus, visible_devices("0,1"), "m");
  EXPECT_EQ(visible.gpus[0].id, "GPU-89320000-d72c-4106-c12f-20bd9faed9f0");
  EXPECT_EQ(visible.gpus[1].id, "GPU-89321111-d72c-4106-c12f-20bd9faed9f1");
  EXPECT_THAT(bus_ids(visible), ElementsAre("0000:1b:00.0", "0000:2b:00.0"));
}

TEST(PlainBusId, IsAsInSysfs) {
  EXPECT_EQ(plain_bus_id("0000:1B:00.0"), "0000:1b:00.0");
  EXPECT_EQ(plain_bus_id("00000000:1B:00.0"), "0000:1b:00.0");
  EXPECT_EQ(plain_bus_id("00010000:1B:00.0"), "10000:1b:00.0");
  EXPECT_EQ(plain_bus_id("000F:1B:00.0"), "000f:1b:00.0");
  EXPECT_EQ(plain_bus_id(""), "");
  EXPECT_EQ(plain_bus_id("000000"), "000000");
}

TEST(ListVisibleGpus, ComputeModes) {
  auto gpus = recorded_gpus("eight_gpus");
  gpus.list[0].compute_mode = devices::ComputeMode::kProhibited;
  gpus.list[1].compute_mode = devices::ComputeMode::kExclusiveProcess;
  gpus.list[2].compute_mode.reset();
  const auto visible = visible_to(gpus);
  EXPECT_TRUE(visible.gpus[0].prohibited);
  EXPECT_FALSE(visible.gpus[0].exclusive);
  EXPECT_TRUE(visible.gpus[1].exclusive);
  EXPECT_FALSE(visible.gpus[2].prohibited || visible.gpus[2].exclusive);
}

// A process in a container may have libcuda and no libnvidia-ml.
TEST(ListVisibleGpus, WithoutNvml) {
  devices::Gpus none;
  none.problem = devices::Problem{"no NVIDIA driver on this machine (libnvidia-ml.so.1 is not there)", ""};
  CudaProbe cuda = cuda_of(recorded_gpus("eight_gpus"), "0,1,2");
  cuda.bus_ids[2] = "";
  const auto visible = list_visible_gpus(cuda, none, visible_devices(std::nullopt), "m1");
  EXPECT_THAT(bus_ids(visible), ElementsAre("0000:1b:00.0", "0000:2b:00.0", ""));
  EXPECT_EQ(visible.gpus[0].id, "0000:1b:00.0 of m1");
  EXPECT_EQ(visible.gpus[2].id, "cuda:2 of m1");
  EXPECT_EQ(to_string(visible.gpus[0], 0), "GPU 0 (0000:1b:00.0)");
  EXPECT_EQ(to_string(visible.gpus[2], 2), "GPU 2");
  EXPECT_EQ(visible.memory_problem, none.problem->what);
  EXPECT_TRUE(visible.machine_has_gpus);
}

TEST(ListVisibleGpus, NoneForCudaWhereTheMachineHasSome) {
  CudaProbe cuda;
  cuda.problem = "this build computes on the CPU only";
  cuda.remedy = "build another";
  const auto visible = list_visible_gpus(cuda, recorded_gpus("one_gpu"), visible_devices(std::nullopt), "m");
  EXPECT_THAT(visible.gpus, IsEmpty());
  EXPECT_EQ(visible.problem, cuda.problem);
  EXPECT_EQ(visible.remedy, cuda.remedy);
  EXPECT_TRUE(visible.machine_has_gpus);
  // Who hides them all knows why.
  EXPECT_FALSE(list_visible_gpus(cuda, recorded_gpus("one_gpu"), visible_devices(""), "m").machine_has_gpus);
  EXPECT_FALSE(list_visible_gpus(cuda, recorded_gpus("no_gpus"), visible_devices(std::nullopt), "m").machine_has_gpus);
}

TEST(ListVisibleGpus, MigDevicesHaveIdsOfTheirOwn) {
  const auto gpus = recorded_gpus("mig");
  const auto first = visible_to(gpus);
  ASSERT_EQ(first.gpus.size(), 1u);
  EXPECT_EQ(first.gpus[0].id, "MIG-01b2c3d4-0000-5000-8000-000000000000");
  EXPECT_EQ(first.gpus[0].free_bytes, 42118152192);
  const auto second = visible_to(gpus, "MIG-11b2c3d4-0000-5000-8000-000000000001");
  ASSERT_EQ(second.gpus.size(), 1u);
  EXPECT_EQ(second.gpus[0].id, "MIG-11b2c3d4-0000-5000-8000-000000000001");
  EXPECT_EQ(second.gpus[0].bus_id, first.gpus[0].bus_id);
  EXPECT_NE(second.gpus[0].name, first.gpus[0].name);
}

TEST(ListVisibleGpus, UnknownMemory) {
  auto gpus = recorded_gpus("one_gpu");
  gpus.list[0].memory.reset();
  EXPECT_NE(visible_to(gpus).memory_problem, "");
}

TEST(RankView, TravelsAsText) {
  RankView view{.machine = "2f1c",
                .host = "a",
                .local_rank = 3,
                .device = "cuda:0,3",
                .share_devices = true,
                .all_devices = true,
                .visible = {}};
  EXPECT_EQ(decode_view(encode(view)), view);
  auto gpus = recorded_gpus("eight_gpus");
  gpus.list[0].compute_mode = devices::ComputeMode::kProhibited;
  gpus.list[1].compute_mode = devices::ComputeMode::kExclusiveProcess;
  gpus.list[2].memory.reset();
  view.visible = visible_to(gpus);
  view.visible.problem = "quoted \"problem\"\nin two lines";
  view.visible.remedy = "→";
  view.visible.memory_problem = "x";
  EXPECT_EQ(decode_view(encode(view)), view);
  view.visible.gpus[0].name = "\xff";  // no UTF-8
  EXPECT_NO_THROW(decode_view(encode(view)));
}

TEST(MachineId, IsTheSameEachTime) {
  EXPECT_FALSE(machine_id().empty());
  EXPECT_EQ(machine_id(), machine_id());
}

}  // namespace
}  // namespace lockstep::session
