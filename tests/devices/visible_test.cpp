#include "devices/visible.h"

#include <gmock/gmock.h>

#include "tests/devices/recorded.h"

namespace lockstep::devices {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::recorded_gpus;

/// "2", or "0:1" for MIG device 1 of GPU 0. No `variable`: it is not set.
std::vector<std::string> seen(const Gpus& gpus, const std::optional<std::string>& variable) {
  const auto visible = visible_gpus(gpus, [&](const std::string& name) {
    EXPECT_EQ(name, "CUDA_VISIBLE_DEVICES");
    return variable;
  });
  std::vector<std::string> names;
  for (const auto& device : visible)
    names.push_back(std::to_string(device.gpu) + (device.mig ? ":" + std::to_string(*device.mig) : ""));
  return names;
}

std::vector<std::string> seen_of_8(const std::optional<std::string>& variable) {
  return seen(recorded_gpus("eight_gpus"), variable);
}

TEST(VisibleGpus, AllWithoutTheVariable) {
  EXPECT_THAT(seen_of_8(std::nullopt), ElementsAre("0", "1", "2", "3", "4", "5", "6", "7"));
  EXPECT_THAT(seen(Gpus{}, std::nullopt), IsEmpty());
  EXPECT_THAT(seen(Gpus{}, "0,1"), IsEmpty());
}

TEST(VisibleGpus, AnEmptyListHidesAll) {
  EXPECT_THAT(seen_of_8(""), IsEmpty());
  EXPECT_THAT(seen_of_8(" "), IsEmpty());
  EXPECT_THAT(seen_of_8("-1"), IsEmpty());
  EXPECT_THAT(seen_of_8("NoDevFiles"), IsEmpty());
}

TEST(VisibleGpus, IndicesInTheirOrder) {
  EXPECT_THAT(seen_of_8("2,0"), ElementsAre("2", "0"));
  EXPECT_THAT(seen_of_8(" 7 , 1 "), ElementsAre("7", "1"));
}

TEST(VisibleGpus, TheFirstThatDoesNotExistEndsTheList) {
  EXPECT_THAT(seen_of_8("0,2,-1,1"), ElementsAre("0", "2"));
  EXPECT_THAT(seen_of_8("0,8,1"), ElementsAre("0"));
  EXPECT_THAT(seen_of_8("0,,1"), ElementsAre("0"));
  EXPECT_THAT(seen_of_8("3,x"), ElementsAre("3"));
  EXPECT_THAT(seen_of_8("3,99999999999999999999"), ElementsAre("3"));
  EXPECT_THAT(seen_of_8("3,GPU-89320000"), ElementsAre("3"));
}

TEST(VisibleGpus, ADeviceThatIsNamedTwiceHidesAll) {
  EXPECT_THAT(seen_of_8("0,1,0"), IsEmpty());
  EXPECT_THAT(seen_of_8("GPU-89320000,GPU-89320000-d72c"), IsEmpty());
}

TEST(VisibleGpus, UuidsMayBeShortened) {
  EXPECT_THAT(seen_of_8("GPU-89323333-d72c-4106-c12f-20bd9faed9f3"), ElementsAre("3"));
  EXPECT_THAT(seen_of_8("GPU-89325,GPU-89321"), ElementsAre("5", "1"));
  EXPECT_THAT(seen_of_8("GPU-8932"), IsEmpty());  // which one?
  EXPECT_THAT(seen_of_8("GPU-89325,GPU-0"), ElementsAre("5"));
  EXPECT_THAT(seen_of_8("GPU-89325,1"), ElementsAre("5"));
}

TEST(VisibleGpus, MigDevicesByTheirIds) {
  const Gpus gpus = recorded_gpus("mig");
  EXPECT_THAT(seen(gpus, "MIG-11b2c3d4-0000-5000-8000-000000000001"), ElementsAre("0:2"));
  EXPECT_THAT(seen(gpus, "MIG-1,MIG-0,GPU-89322222"), ElementsAre("0:2", "0:0", "2"));
  EXPECT_THAT(seen(gpus, "MIG-GPU-89320000-d72c-4106-c12f-20bd9faed9f0/9/0"), ElementsAre("0:2"));
  EXPECT_THAT(seen(gpus, "MIG-GPU-89320000-d72c-4106-c12f-20bd9faed9f0/8/0"), IsEmpty());
}

TEST(VisibleGpus, MigGpuStandsForItsInstances) {
  const Gpus gpus = recorded_gpus("mig");
  EXPECT_THAT(seen(gpus, std::nullopt), ElementsAre("0:0", "0:2", "2"));
  EXPECT_THAT(seen(gpus, "0"), ElementsAre("0:0", "0:2"));
  EXPECT_THAT(seen(gpus, "GPU-89320000,MIG-1"), IsEmpty());  // twice
  EXPECT_THAT(seen(gpus, "1,2"), IsEmpty());                 // it has no parts: nothing that could be used
}

TEST(VisibleGpus, CardsThatDoNotAnswerAreNotCounted) {
  const Gpus gpus = recorded_gpus("trouble");
  EXPECT_THAT(seen(gpus, std::nullopt), ElementsAre("0", "6"));
  EXPECT_THAT(seen(gpus, "1"), ElementsAre("6"));
  EXPECT_THAT(seen(gpus, "2"), IsEmpty());
}

TEST(VisibleGpus, CanBeNamedByTheirIds) {
  for (const char* recording : {"eight_gpus", "mig", "tells_little"}) {
    const Gpus gpus = recorded_gpus(recording);
    const auto all = visible_gpus(gpus, [](const std::string&) { return std::nullopt; });
    EXPECT_FALSE(all.empty());
    for (const auto& device : all) {
      const auto again = visible_gpus(gpus, [&](const std::string&) { return device.id; });
      EXPECT_THAT(again, ElementsAre(device)) << device.id;
    }
  }
}

VisibleDevice with_free(std::optional<std::int64_t> bytes) {
  VisibleDevice device;
  device.free_bytes = bytes;
  return device;
}

TEST(MostFree, TheFreestFirst) {
  const std::vector<VisibleDevice> visible = {with_free(5), with_free(9), with_free(7), with_free(9)};
  EXPECT_THAT(most_free(visible, 1), ElementsAre(1));
  EXPECT_THAT(most_free(visible, 2), ElementsAre(1, 3));
  EXPECT_THAT(most_free(visible, 4), ElementsAre(1, 3, 2, 0));
  EXPECT_THAT(most_free(visible, 0), IsEmpty());
}

TEST(MostFree, ThereMayBeFewer) {
  EXPECT_THAT(most_free({}, 3), IsEmpty());
  std::vector<VisibleDevice> visible = {with_free(std::nullopt), with_free(0), with_free(9)};
  visible[2].prohibited = true;
  EXPECT_THAT(most_free(visible, 3), ElementsAre(1, 0));
}

TEST(Emptiest, GpusWithAboutAsMuchFreeAsTheFreest) {
  const std::vector<VisibleDevice> visible = {with_free(890), with_free(1000), with_free(900), with_free(5),
                                              with_free(1000)};
  EXPECT_THAT(emptiest(visible), ElementsAre(1, 4, 2));
  EXPECT_THAT(emptiest({}), IsEmpty());
}

TEST(Emptiest, SkipsProhibitedAndUnknown) {
  std::vector<VisibleDevice> visible = {with_free(std::nullopt), with_free(1000), with_free(0), with_free(950)};
  visible[1].prohibited = true;
  EXPECT_THAT(emptiest(visible), ElementsAre(3));
  EXPECT_THAT(emptiest(std::vector{with_free(std::nullopt)}), IsEmpty());
  EXPECT_THAT(emptiest(std::vector{with_free(0), with_free(0)}), ElementsAre(0, 1));
}

TEST(MostFree, OfARecordedMachine) {
  const Gpus gpus = recorded_gpus("eight_gpus");  // each card uses more than the one before
  const auto visible = visible_gpus(gpus, [](const std::string&) { return "6,2,4"; });
  EXPECT_THAT(most_free(visible, 2), ElementsAre(1, 2));
}

}  // namespace
}  // namespace lockstep::devices
