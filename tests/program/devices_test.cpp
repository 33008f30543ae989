// lockstep devices, and what lockstep launch makes of the devices, as people call them. A stand-in for NVIDIA's library
// lies where the loader looks for it; machines that have the real one are none the worse.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

std::string with_gpus(const std::string& recording, const std::string& line) {
  return "LD_LIBRARY_PATH=" FAKE_NVML_DIRECTORY " LOCKSTEP_TEST_NVML=" RECORDINGS "/" + recording + ".json " + line;
}

TEST(DevicesTest, ShowsTheCardsAndTheCpu) {
  const TemporaryDirectory directory;
  const auto outcome = run(with_gpus("eight_gpus", "lockstep devices"), directory.path());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("8 GPUs │"));
  EXPECT_THAT(outcome.out, HasSubstr("│    7 │ NVIDIA H100 80GB HBM3"));
  EXPECT_THAT(outcome.out, HasSubstr("│  CPU │"));
}

TEST(DevicesTest, JsonIsOneObject) {
  const TemporaryDirectory directory;
  const auto outcome = run(with_gpus("eight_gpus", "lockstep devices --json"), directory.path());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(lines_of(outcome.out).size(), 1u);
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["gpus"].size(), 8u);
  EXPECT_GE(json["cpu"]["processors"], 1);
}

TEST(DevicesTest, TroubleIsAnAnswerAndNoError) {
  const TemporaryDirectory directory;
  for (const char* recording : {"trouble", "no_gpus", "driver_not_loaded", "version_mismatch"}) {
    const auto outcome = run(with_gpus(recording, "lockstep devices"), directory.path());
    EXPECT_EQ(outcome.code, 0) << recording;
    EXPECT_EQ(outcome.err, "") << recording;
    EXPECT_THAT(outcome.out, HasSubstr("│  CPU │")) << recording;
  }
}

TEST(DevicesTest, ALibraryThatCannotBeLoadedIsNamed) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "libnvidia-ml.so.1") << "no library";
  const auto outcome = run("LD_LIBRARY_PATH=. lockstep devices", directory.path());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("management library cannot be loaded"));
}

int ranks_started(const std::string& line) {
  const TemporaryDirectory directory;
  const auto outcome = run(line, directory.path());
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return static_cast<int>(lines_of(outcome.out).size());
}

TEST(DevicesTest, LaunchStartsARankForEachVisibleGpu) {
  EXPECT_EQ(ranks_started(with_gpus("eight_gpus", "lockstep launch --no-prefix -- echo rank")), 8);
  EXPECT_EQ(ranks_started(with_gpus("eight_gpus", "CUDA_VISIBLE_DEVICES=5,1,3 lockstep launch -n auto -- echo rank")),
            3);
  EXPECT_EQ(ranks_started(with_gpus("eight_gpus", "lockstep launch -n 1 -- echo rank")), 1);
}

TEST(DevicesTest, LaunchStartsARankForEachCoreWhereNoGpuIsVisible) {
  EXPECT_EQ(
      ranks_started("taskset -c 0 env " + with_gpus("eight_gpus", "CUDA_VISIBLE_DEVICES= lockstep launch -- echo r")),
      1);
  EXPECT_EQ(ranks_started("taskset -c 0 env " + with_gpus("driver_not_loaded", "lockstep launch -- echo rank")), 1);
}

}  // namespace
}  // namespace lockstep::testing
