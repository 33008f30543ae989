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

}  // namespace
}  // namespace lockstep::testing
