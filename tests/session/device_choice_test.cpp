#include "session/device_choice.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "tests/session/recorded_ranks.h"

namespace lockstep::session {
namespace {

using devices::testing::recorded_gpus;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::visible_to;

VisibleGpus without_gpus(const std::string& problem) {
  VisibleGpus visible;
  visible.problem = problem;
  visible.remedy = "install one";
  return visible;
}

/// `count` ranks on one host that all ask for the same and see the same.
std::vector<RankView> ranks(int count, const std::string& device, const VisibleGpus& visible, bool share = false) {
  std::vector<RankView> made;
  for (int r = 0; r < count; ++r)
    made.push_back(
        {.machine = "m", .host = "a", .local_rank = r, .device = device, .share_devices = share, .visible = visible});
  return made;
}

std::vector<int> indices(const std::vector<RankView>& views) {
  std::vector<int> chosen;
  for (int r = 0; r < static_cast<int>(views.size()); ++r) {
    const auto choice = choose_device(views, r);
    EXPECT_EQ(choice.device.kind, DeviceKind::kCuda);
    EXPECT_EQ(choice.gpu,
              views[static_cast<std::size_t>(r)].visible.gpus[static_cast<std::size_t>(choice.device.index)]);
    chosen.push_back(choice.device.index);
  }
  return chosen;
}

/// What rank `rank` is refused with; empty where it gets a device.
std::string refusal(const std::vector<RankView>& views, int rank) {
  try {
    choose_device(views, rank);
  } catch (const DeviceError& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    return error.line();
  }
  return "";
}

/// All of them are refused in the same words, which are said once.
std::string refusal_of_all(const std::vector<RankView>& views) {
  const std::string first = refusal(views, 0);
  EXPECT_NE(first, "");
  for (int r = 1; r < static_cast<int>(views.size()); ++r) EXPECT_EQ(refusal(views, r), first) << r;
  return first;
}

TEST(ChooseDevice, TheCpu) {
  const auto views = ranks(3, "cpu", visible_to(recorded_gpus("eight_gpus")));
  for (int r = 0; r < 3; ++r) {
    const auto choice = choose_device(views, r);
    EXPECT_EQ(choice.device, Device{});
    EXPECT_FALSE(choice.tell);
  }
}

TEST(ChooseDevice, AListOfCpuDevices) {
  const auto three = ranks(3, "cpu:0,4", {});
  for (const int rank : {0, 1}) EXPECT_EQ(choose_device(three, rank).device, Device{});
  EXPECT_THAT(refusal(three, 2), HasSubstr("local rank 2 of host a, and 2 CPU devices in this list"));
  EXPECT_EQ(choose_device(ranks(3, "cpu:0,4", {}, /*share=*/true), 2).device, Device{});
}

TEST(ChooseDevice, ALocalRankTakesTheGpuOfItsNumber) {
  const auto all = visible_to(recorded_gpus("eight_gpus"));
  EXPECT_THAT(indices(ranks(8, "cuda", all)), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(indices(ranks(2, "cuda", all)), ElementsAre(0, 1));
  EXPECT_EQ(choose_device(ranks(2, "cuda", all), 1).gpu.bus_id, "0000:2b:00.0");
  // CUDA_VISIBLE_DEVICES renumbers them.
  const auto some = visible_to(recorded_gpus("eight_gpus"), "6,2");
  EXPECT_THAT(indices(ranks(2, "cuda", some)), ElementsAre(0, 1));
  EXPECT_EQ(choose_device(ranks(2, "cuda", some), 0).gpu.bus_id, "0000:7b:00.0");
}

TEST(ChooseDevice, LocalRanksCountNotRanks) {
  const auto gpus = recorded_gpus("eight_gpus");
  auto views = ranks(4, "cuda", visible_to(gpus));
  for (int r = 0; r < 4; ++r) views[static_cast<std::size_t>(r)].local_rank = 3 - r;
  EXPECT_THAT(indices(views), ElementsAre(3, 2, 1, 0));
  // Two hosts with two ranks each, dealt round robin. Their GPUs are not the same ones.
  auto other = gpus;
  for (auto& gpu : other.list) gpu.uuid = "GPU-b" + gpu.uuid->substr(5);
  for (const std::size_t r : {1u, 3u}) {
    views[r].host = views[r].machine = "b";
    views[r].visible = visible_to(other, std::nullopt, "b");
  }
  for (std::size_t r = 0; r < 4; ++r) views[r].local_rank = static_cast<int>(r / 2);
  EXPECT_THAT(indices(views), ElementsAre(0, 0, 1, 1));
}

TEST(ChooseDevice, AList) {
  const auto all = visible_to(recorded_gpus("eight_gpus"));
  EXPECT_THAT(indices(ranks(2, "cuda:0,3", all)), ElementsAre(0, 3));
  EXPECT_THAT(indices(ranks(3, "cuda:7,5,6", all)), ElementsAre(7, 5, 6));
  EXPECT_THAT(indices(ranks(1, "cuda:0,3", all)), ElementsAre(0));
  EXPECT_THAT(indices(ranks(1, "cuda:1", visible_to(recorded_gpus("eight_gpus"), "6,2"))), ElementsAre(1));
  // One device each, named to each alone.
  auto views = ranks(2, "cuda:4", all);
  views[1].device = "cuda:1";
  EXPECT_THAT(indices(views), ElementsAre(4, 1));
}

TEST(ChooseDevice, ThoseWithMostFreeMemory) {
  const auto gpus = recorded_gpus("eight_gpus");  // each metadata uses more than the one before
  EXPECT_THAT(indices(ranks(2, "cuda:free", visible_to(gpus, "6,2,4"))), ElementsAre(1, 2));
  // Rank 0's reading decides, whatever the others have read meanwhile.
  auto views = ranks(3, "cuda:free", visible_to(gpus));
  views[1].visible.gpus[0].free_bytes = 0;
  views[2].visible.gpus[7].free_bytes = std::int64_t{1} << 50;
  EXPECT_THAT(indices(views), ElementsAre(0, 1, 2));
  // Those that take nobody are no choice.
  auto closed = gpus;
  closed.list[0].compute_mode = devices::ComputeMode::kProhibited;
  EXPECT_THAT(indices(ranks(2, "cuda:free", visible_to(closed))), ElementsAre(1, 2));
}

/// All devices of one process that computes on several.
std::vector<int> devices_of_one(const std::string& device, const VisibleGpus& visible) {
  auto views = ranks(1, device, visible);
  views[0].all_devices = true;
  const auto choice = choose_device(views, 0);
  if (choice.device.kind == DeviceKind::kCuda) {
    EXPECT_EQ(choice.device.index, choice.devices.front());
    EXPECT_EQ(choice.gpu, visible.gpus[static_cast<std::size_t>(choice.device.index)]);
  }
  return choice.devices;
}

TEST(ChooseDevice, OneProcessOnSeveral) {
  const auto gpus = recorded_gpus("eight_gpus");
  const auto all = visible_to(gpus);
  EXPECT_THAT(devices_of_one("cuda", all), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(devices_of_one("auto", visible_to(gpus, "5,6")), ElementsAre(0, 1));
  EXPECT_THAT(devices_of_one("cuda:6,2", all), ElementsAre(6, 2));
  EXPECT_THAT(devices_of_one("cpu:1,0", {}), ElementsAre(1, 0));
  EXPECT_THAT(devices_of_one("cpu", {}), ElementsAre(0));
  EXPECT_THAT(devices_of_one("auto", without_gpus("no NVIDIA driver is loaded")), ElementsAre(0));
  // Of one that computes on one it is that one.
  EXPECT_THAT(choose_device(ranks(1, "cuda:6,2", all), 0).devices, ElementsAre(6));
}

TEST(ChooseDevice, OneProcessOnTheEmptiest) {
  auto gpus = recorded_gpus("eight_gpus");  // each metadata uses more than the one before
  const auto set_free = [&](std::size_t gpu, double share) {
    auto& memory = *gpus.list[gpu].memory;
    memory.free_bytes = static_cast<std::int64_t>(share * static_cast<double>(memory.total_bytes));
  };
  for (std::size_t gpu = 0; gpu < 8; ++gpu) set_free(gpu, 0.2);
  set_free(5, 0.98);
  set_free(2, 0.97);
  set_free(3, 0.80);
  EXPECT_THAT(devices_of_one("cuda:free", visible_to(gpus)), ElementsAre(5, 2));
  EXPECT_THAT(devices_of_one("cuda:free", visible_to(gpus, "3,2,0")), ElementsAre(1));
  gpus.list[5].compute_mode = devices::ComputeMode::kProhibited;
  EXPECT_THAT(devices_of_one("cuda:free", visible_to(gpus)), ElementsAre(2));
  auto views = ranks(1, "cuda:0,5", visible_to(gpus));
  views[0].all_devices = true;
  EXPECT_THAT(refusal(views, 0), HasSubstr("GPU 5 (NVIDIA H100 80GB HBM3, 0000:6b:00.0) is 'prohibited'"));
}

TEST(ChooseDevice, FreeMemoryThatIsNotKnown) {
  devices::Gpus none;
  none.problem = devices::Problem{"libnvidia-ml.so.1 is not there", ""};
  const auto cuda = testing::cuda_of(recorded_gpus("eight_gpus"));
  const auto visible = list_visible_gpus(cuda, none, testing::visible_devices(std::nullopt), "m");
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda:free", visible)),
              AllOf(HasSubstr("free memory of the GPUs is not known: libnvidia-ml.so.1 is not there"),
                    HasSubstr("→ name the GPUs: --device cuda:0,1")));
  // All else goes without NVML.
  EXPECT_THAT(indices(ranks(2, "cuda", visible)), ElementsAre(0, 1));
  EXPECT_THAT(indices(ranks(2, "cuda:5,3", visible)), ElementsAre(5, 3));
}

// Slurm's --gpus-per-task, for one: each rank sees a GPU of its own, which is its number 0.
TEST(ChooseDevice, ALauncherGivesEachRankAGpu) {
  const auto gpus = recorded_gpus("eight_gpus");
  for (const char* device : {"cuda", "auto", "cuda:0", "cuda:free"}) {
    auto views = ranks(4, device, {});
    for (int r = 0; r < 4; ++r) views[static_cast<std::size_t>(r)].visible = visible_to(gpus, std::to_string(r));
    EXPECT_THAT(indices(views), ElementsAre(0, 0, 0, 0)) << device;
  }
  // Two GPUs for each pair of ranks.
  auto views = ranks(4, "cuda", {});
  for (int r = 0; r < 4; ++r) views[static_cast<std::size_t>(r)].visible = visible_to(gpus, r < 2 ? "0,1" : "2,3");
  EXPECT_THAT(indices(views), ElementsAre(0, 1, 0, 1));
  // MIG devices of one card are devices.
  const auto mig = recorded_gpus("mig");
  views = ranks(2, "cuda", {});
  views[0].visible = visible_to(mig, "MIG-0");
  views[1].visible = visible_to(mig, "MIG-1");
  EXPECT_THAT(indices(views), ElementsAre(0, 0));
}

TEST(ChooseDevice, MoreRanksThanGpus) {
  const auto two = visible_to(recorded_gpus("eight_gpus"), "0,1");
  EXPECT_THAT(refusal_of_all(ranks(3, "cuda", two)),
              AllOf(HasSubstr("--device cuda: 3 ranks on host a, and 2 GPUs for them"),
                    HasSubstr("start at most 2 ranks there, or add --share-devices")));
  EXPECT_THAT(refusal_of_all(ranks(3, "cuda:free", two)), HasSubstr("3 ranks on host a, and 2 GPUs"));
  EXPECT_THAT(refusal_of_all(ranks(3, "cuda:0,1", visible_to(recorded_gpus("eight_gpus")))),
              AllOf(HasSubstr("3 ranks on host a, and 2 GPUs in this list"), HasSubstr("name more GPUs")));
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda", visible_to(recorded_gpus("mig")))),
              HasSubstr("2 ranks on host a, and 1 GPU for them"));
  EXPECT_THAT(indices(ranks(5, "cuda", two, true)), ElementsAre(0, 1, 0, 1, 0));
  EXPECT_THAT(indices(ranks(3, "cuda:1", two, true)), ElementsAre(1, 1, 1));
  EXPECT_THAT(indices(ranks(3, "cuda:free", two, true)), ElementsAre(0, 1, 0));
  EXPECT_THAT(indices(ranks(3, "cuda:0,0,1", two, true)), ElementsAre(0, 0, 1));
  // All who share must have said so.
  auto views = ranks(3, "cuda", two, true);
  views[2].share_devices = false;
  EXPECT_THAT(refusal_of_all(views), HasSubstr("3 ranks on host a, and 2 GPUs"));
}

TEST(ChooseDevice, TwoRanksOnOneGpu) {
  const auto gpus = recorded_gpus("eight_gpus");
  auto views = ranks(3, "cuda:2", visible_to(gpus));
  views[0].device = "cuda:1";
  views[2].device = "cuda:2,5";
  EXPECT_EQ(refusal(views, 0), "");
  EXPECT_THAT(refusal(views, 1),
              AllOf(HasSubstr("rank 1 and rank 2 would both compute on GPU 2 (NVIDIA H100 80GB HBM3, 0000:3b:00.0) of "
                              "host a"),
                    HasSubstr("--share-devices")));
  EXPECT_THAT(refusal(views, 2), HasSubstr("rank 1 and rank 2"));
  for (auto& view : views) view.share_devices = true;
  EXPECT_THAT(indices(views), ElementsAre(1, 2, 2));
  // Lists of their own that share one GPU, under different numbers.
  views = ranks(2, "cuda", {});
  views[0].visible = visible_to(gpus, "3");
  views[1].visible = visible_to(gpus, "3,4");
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda:0", visible_to(gpus, "3"))), HasSubstr("2 ranks on host a, and 1 GPU"));
  EXPECT_THAT(refusal(views, 0), HasSubstr("rank 0 and rank 1 would both compute on GPU 0"));
  EXPECT_THAT(refusal(views, 1), HasSubstr("rank 0 and rank 1 would both compute on GPU 0"));
  // In containers that call themselves other hosts, each taking itself for the only one.
  views = ranks(2, "cuda:0", visible_to(gpus));
  views[0].machine = views[1].machine = "kernel";
  views[1].host = "b";
  views[1].local_rank = 0;
  EXPECT_THAT(refusal(views, 1), HasSubstr("2 ranks on host a, and 1 GPU in this list"));
  for (auto& view : views) view.device = "cuda";
  EXPECT_THAT(indices(views), ElementsAre(0, 1));
}

TEST(ChooseDevice, WithoutNvmlTheBusTellsGpusApart) {
  devices::Gpus none;
  none.problem = devices::Problem{"not there", ""};
  const auto see = [&](const char* variable, const std::string& machine) {
    return list_visible_gpus(testing::cuda_of(recorded_gpus("eight_gpus"), variable), none,
                             testing::visible_devices(variable), machine);
  };
  auto views = ranks(2, "cuda", {});
  views[0].visible = see("3", "m");
  views[1].visible = see("3,4", "m");
  EXPECT_THAT(refusal(views, 0), HasSubstr("rank 0 and rank 1 would both compute on GPU 0 (0000:4b:00.0)"));
  views[1].machine = views[1].host = "n";
  views[1].visible = see("3,4", "n");
  EXPECT_THAT(indices(views), ElementsAre(0, 0));
}

TEST(ChooseDevice, AnIndexThatDoesNotExist) {
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda:0,9", visible_to(recorded_gpus("eight_gpus")))),
              AllOf(HasSubstr("--device cuda:0,9: there is no GPU 9"), HasSubstr("8 GPUs, cuda:0 to cuda:7")));
  EXPECT_THAT(
      refusal_of_all(ranks(1, "cuda:1", visible_to(recorded_gpus("eight_gpus"), "5"))),
      AllOf(HasSubstr("there is no GPU 1"), HasSubstr("1 GPU, which is cuda:0"), HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST(ChooseDevice, NoCuda) {
  for (const char* device : {"cuda", "cuda:9", "cuda:free"})
    EXPECT_EQ(refusal_of_all(ranks(2, device, without_gpus("no NVIDIA driver is loaded"))),
              fmt::format("--device {}: no NVIDIA driver is loaded → install one", device));
  EXPECT_THAT(refusal_of_all(ranks(1, "cuda", visible_to(recorded_gpus("eight_gpus"), ""))),
              HasSubstr("no GPU is visible"));
}

TEST(ChooseDevice, ComputeModes) {
  auto gpus = recorded_gpus("eight_gpus");
  gpus.list[1].compute_mode = devices::ComputeMode::kProhibited;
  gpus.list[2].compute_mode = devices::ComputeMode::kExclusiveProcess;
  const auto visible = visible_to(gpus);
  EXPECT_EQ(refusal(ranks(2, "cuda", visible), 0), "");
  EXPECT_THAT(refusal(ranks(2, "cuda", visible), 1),
              AllOf(HasSubstr("GPU 1 (NVIDIA H100 80GB HBM3, 0000:2b:00.0) is 'prohibited'"),
                    HasSubstr("nvidia-smi -i 0000:2b:00.0 -c DEFAULT")));
  EXPECT_THAT(indices(ranks(2, "cuda:0,2", visible)), ElementsAre(0, 2));
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda:2", visible, true)),
              AllOf(HasSubstr("rank 0 and rank 1"), HasSubstr("GPU 2"), HasSubstr("takes one process")));
  for (auto& gpu : gpus.list) gpu.compute_mode = devices::ComputeMode::kProhibited;
  EXPECT_THAT(refusal_of_all(ranks(2, "cuda:free", visible_to(gpus))), HasSubstr("every GPU is 'prohibited'"));
}

TEST(ChooseDevice, AutoIsAGpuForEach) {
  EXPECT_THAT(indices(ranks(8, "auto", visible_to(recorded_gpus("eight_gpus")))), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(indices(ranks(1, "auto", visible_to(recorded_gpus("one_gpu")))), ElementsAre(0));
  EXPECT_THAT(indices(ranks(2, "auto", visible_to(recorded_gpus("one_gpu")), true)), ElementsAre(0, 0));
}

/// The reason why all ranks are on the CPU.
std::string on_the_cpu(const std::vector<RankView>& views, bool tell) {
  const auto first = choose_device(views, 0);
  for (int r = 0; r < static_cast<int>(views.size()); ++r) {
    const auto choice = choose_device(views, r);
    EXPECT_EQ(choice.device, Device{}) << r;
    EXPECT_EQ(choice.why_cpu, first.why_cpu) << r;
    EXPECT_EQ(choice.tell, tell) << r;
  }
  return first.why_cpu;
}

TEST(ChooseDevice, AutoIsTheCpuForAll) {
  EXPECT_EQ(on_the_cpu(ranks(2, "auto", without_gpus("no NVIDIA driver is loaded")), false),
            "no NVIDIA driver is loaded");
  // GPUs that are there and not used are worth a word.
  const auto one = visible_to(recorded_gpus("one_gpu"));
  EXPECT_THAT(on_the_cpu(ranks(2, "auto", one), true), Eq("2 ranks on host a, and 1 GPU for them"));
  auto old = without_gpus("the NVIDIA driver runs CUDA up to 12.8, this program needs 13.0");
  old.machine_has_gpus = true;
  EXPECT_THAT(on_the_cpu(ranks(1, "auto", old), true), HasSubstr("12.8"));
  // One host of two has none.
  auto views = ranks(2, "auto", one);
  views[1].machine = views[1].host = "b";
  views[1].visible = without_gpus("no NVIDIA driver is loaded");
  EXPECT_EQ(on_the_cpu(views, true), "host b: no NVIDIA driver is loaded");
  // One of the metadata takes nobody.
  auto gpus = recorded_gpus("eight_gpus");
  gpus.list[1].compute_mode = devices::ComputeMode::kProhibited;
  EXPECT_THAT(on_the_cpu(ranks(4, "auto", visible_to(gpus)), true), HasSubstr("GPU 1"));
}

TEST(ChooseDevice, AutoBesideCuda) {
  // They take GPUs one after the other as if all had said cuda.
  auto views = ranks(2, "cuda", visible_to(recorded_gpus("eight_gpus")));
  views[0].device = "auto";
  EXPECT_THAT(indices(views), ElementsAre(0, 1));
}

}  // namespace
}  // namespace lockstep::session
