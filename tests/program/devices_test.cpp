// lockstep devices, and what lockstep launch makes of the devices, as people call them. A stand-in for NVIDIA's library
// lies where the loader looks for it; machines that have the real one are none the worse.
#include <gmock/gmock.h>

#include <fstream>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::string with_gpus(const std::string& recording, const std::string& line) {
  return "unset CUDA_VISIBLE_DEVICES; LD_LIBRARY_PATH=" FAKE_NVML_DIRECTORY " LOCKSTEP_TEST_NVML=" RECORDINGS "/" +
         recording + ".json " + line;
}

TEST(DevicesTest, ShowsTheCardsAndTheCpu) {
  const TemporaryDirectory directory;
  const auto outcome = run_well(with_gpus("eight_gpus", "lockstep devices"), directory.path());
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("8 GPUs │"));
  EXPECT_THAT(outcome.out, HasSubstr("│    7 │ NVIDIA H100 80GB HBM3"));
  EXPECT_THAT(outcome.out, HasSubstr("│  CPU │"));
}

TEST(DevicesTest, JsonIsOneObject) {
  const TemporaryDirectory directory;
  const auto outcome = run_well(with_gpus("eight_gpus", "lockstep devices --json"), directory.path());
  EXPECT_EQ(lines_of(outcome.out).size(), 1u);
  const auto document = json_in(outcome.out);
  EXPECT_EQ(document["gpus"].size(), 8u);
  EXPECT_GE(document["cpu"]["processors"], 1);
}

TEST(DevicesTest, MeasuresTheCpu) {
  const TemporaryDirectory directory;
  const auto outcome = run_well("lockstep devices --measure --json", directory.path());
  const auto rates = json_in(outcome.out)["measured"].back();
  EXPECT_EQ(rates["device"], "cpu");
  EXPECT_GE(rates["threads"], 1);
  EXPECT_GT(rates["copy_bytes_per_s"], 1e6);
  EXPECT_GT(rates["core_flops"], 1e8);
  EXPECT_EQ(rates["products"].back()["precision"], "f32");
  EXPECT_GT(rates["products"].back()["tflops"], 0.0);
  const auto table = run("lockstep devices --measure", directory.path());
  EXPECT_THAT(table.out, HasSubstr(": measured "));
}

TEST(DevicesTest, TroubleIsAnAnswerAndNoError) {
  const TemporaryDirectory directory;
  for (const char* recording : {"trouble", "no_gpus", "driver_not_loaded", "version_mismatch"}) {
    const auto outcome = run_well(with_gpus(recording, "lockstep devices"), directory.path());
    EXPECT_EQ(outcome.err, "") << recording;
    EXPECT_THAT(outcome.out, HasSubstr("│  CPU │")) << recording;
  }
}

/// How many ranks a launch has started: each says a word.
std::size_t ranks_of(const std::string& recording, const std::string& flags, const std::string& more = "") {
  const TemporaryDirectory directory;
  const auto outcome = run_well(with_gpus(recording, "lockstep launch --no-prefix " + flags + " -- echo rank " + more),
                                directory.path());
  return lines_of(outcome.out).size();
}

TEST(DevicesTest, ARankForEachGpuThatIsVisible) {
  const TemporaryDirectory directory;
  const bool built = run("lockstep version", directory.path()).out.find("nccl") != std::string::npos;
  const std::size_t cores = ranks_of("no_gpus", "");
  EXPECT_GE(cores, 1u);
  EXPECT_EQ(ranks_of("eight_gpus", ""), built ? 8u : cores);
  EXPECT_EQ(ranks_of("eight_gpus", "-n auto"), built ? 8u : cores);
  EXPECT_EQ(ranks_of("eight_gpus", "-n auto", "--device cpu"), cores);
  EXPECT_EQ(ranks_of("eight_gpus", "-n 3"), 3u);
  EXPECT_EQ(ranks_of("driver_not_loaded", ""), cores);
}

// The library in NVML's place reports GPUs, and CUDA has none to compute on.
TEST(AutoTest, GpusThatCannotBeUsedAreWorthALine) {
  if (std::filesystem::exists("/proc/driver/nvidia/version")) GTEST_SKIP() << "an NVIDIA driver is loaded";
  const TemporaryDirectory directory;
  const auto said = [&](const std::string& recording, const std::string& line) {
    const auto outcome = run_well(with_gpus(recording, line), directory.path());
    std::vector<std::string> lines;
    for (const auto& one : lines_of(outcome.out + outcome.err))
      if (one.find("computing on the CPU") != std::string::npos) lines.push_back(one);
    return lines;
  };
  const std::string train = "lockstep train cnn --data digits --steps 1";
  EXPECT_THAT(said("eight_gpus", train), ElementsAre(StartsWith("computing on the CPU: ")));
  EXPECT_THAT(said("eight_gpus", "lockstep launch -n 2 -- " + train), ElementsAre(HasSubstr("computing on the CPU: ")));
  EXPECT_THAT(said("eight_gpus", train + " --quiet"), IsEmpty());
  EXPECT_THAT(said("eight_gpus", train + " --device cpu"), IsEmpty());
  EXPECT_THAT(said("eight_gpus", "CUDA_VISIBLE_DEVICES= " + train), IsEmpty());
  EXPECT_THAT(said("no_gpus", train), IsEmpty());
  EXPECT_THAT(said("driver_not_loaded", train), IsEmpty());
}

TEST(DevicesTest, ALibraryThatCannotBeLoadedIsNamed) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "libnvidia-ml.so.1") << "no library";
  const auto outcome = run_well("LD_LIBRARY_PATH=. lockstep devices", directory.path());
  EXPECT_THAT(outcome.out, HasSubstr("management library cannot be loaded"));
}

}  // namespace
}  // namespace lockstep::testing
