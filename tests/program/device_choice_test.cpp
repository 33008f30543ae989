// The choice of each rank's device, its refusals, and one process on several devices: the program, with CUDA as a
// machine in software with two GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kTrainLinear = "lockstep train linear --data random:5,64 --steps 2 ";

Outcome run_soft(const std::string& line, const std::filesystem::path& directory) {
  return run(line, directory, 60, LOCKSTEP_SOFT_PROGRAM);
}

/// What the launcher's account does not repeat.
std::vector<std::string> lines_with(const Outcome& outcome, const std::string& text) {
  std::vector<std::string> found;
  for (const auto& line : lines_of(outcome.out + outcome.err))
    if (line.find(text) != std::string::npos && line.find("lockstep:   |") == std::string::npos) found.push_back(line);
  return found;
}

/// NVML as `recording` has it; the machine's own is no business of this machine.
std::string with_nvml(const std::string& recording, const std::string& line) {
  return "LD_LIBRARY_PATH=" FAKE_NVML_DIRECTORY " LOCKSTEP_TEST_NVML=" RECORDINGS "/" + recording + ".json " + line;
}

/// `ranks` processes whose flags are `flags`, with the rank in $R.
std::string launched_with(int ranks, const std::string& flags) {
  return "lockstep launch -n " + std::to_string(ranks) + " -- bash -c \"R=\\$OMPI_COMM_WORLD_RANK; exec " +
         kTrainLinear + flags + "\"";
}

struct Refusal {
  std::string line;
  int code;
  std::string says, remedy;
};

class RefusedDevice : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusedDevice, IsOneLine) {
  const TemporaryDirectory directory;
  const auto outcome = run_soft(GetParam().line, directory.path());
  EXPECT_EQ(outcome.code, GetParam().code) << outcome.out << outcome.err;
  EXPECT_THAT(lines_with(outcome, "error: "),
              ElementsAre(AllOf(HasSubstr(GetParam().says), HasSubstr(" → "), HasSubstr(GetParam().remedy))))
      << outcome.out << outcome.err;
}

const std::string kNobodyTells = "driver_not_loaded";

INSTANTIATE_TEST_SUITE_P(
    Alone, RefusedDevice,
    ::testing::Values(Refusal{with_nvml(kNobodyTells, kTrainLinear + std::string("--device cuda:9")), 4,
                              "there is no GPU 9: this process sees 2 GPUs, cuda:0 to cuda:1", "lockstep devices"},
                      Refusal{with_nvml(kNobodyTells, kTrainLinear + std::string("--device cuda:free")), 4,
                              "free memory of the GPUs is not known: the driver is not loaded", "cuda:0,1"},
                      Refusal{with_nvml("compute_modes", kTrainLinear + std::string("--device cuda:1")), 4,
                              "GPU 1 (NVIDIA H100 80GB HBM3, 0000:1c:00.0) is 'prohibited'",
                              "nvidia-smi -i 0000:1c:00.0"},
                      Refusal{kTrainLinear + std::string("--backend shm"), 2, "--backend shm on GPUs", "--device cpu"},
                      Refusal{kTrainLinear + std::string("--backend mpi"), 2, "travel over NCCL", "--device cpu"}));

INSTANTIATE_TEST_SUITE_P(
    OnRanks, RefusedDevice,
    ::testing::Values(
        Refusal{with_nvml(kNobodyTells, launched_with(3, "--device cuda")), 4, "--device cuda: 3 ranks on host ",
                "start at most 2 ranks there"},
        Refusal{with_nvml(kNobodyTells, launched_with(2, "--device cuda:1")), 4, "1 GPU in this list",
                "--share-devices"},
        Refusal{with_nvml(kNobodyTells, launched_with(2, "--device cuda:0,5")), 4, "there is no GPU 5",
                "lockstep devices"},
        Refusal{with_nvml(kNobodyTells, launched_with(2, "--device cuda:1\\$([ \\$R = 0 ] || echo ,0)")), 4,
                "rank 0 and rank 1 would both compute on GPU 1 (0000:1c:00.0) of host ", "--share-devices"},
        Refusal{with_nvml("compute_modes", launched_with(2, "--device cuda:0 --share-devices")), 4,
                "rank 0 and rank 1 would both compute on GPU 0 (NVIDIA H100 80GB HBM3, 0000:1b:00.0) of host ",
                "nvidia-smi -i 0000:1b:00.0"},
        Refusal{with_nvml("compute_modes", launched_with(2, "--device cuda:free")), 4, "2 ranks on host ",
                "start at most 1 rank there"},
        Refusal{with_nvml(kNobodyTells, launched_with(2, "--device c\\$([ \\$R = 0 ] && echo pu || echo uda)")), 5,
                "has device=cuda where rank 0", "same binary and options"}));

/// A run of `ranks` that finds GPUs and yet trains on the CPU, which one line explains.
void expect_cpu(const std::string& line, const std::string& why) {
  const TemporaryDirectory directory;
  const auto outcome = ended_well(run_soft(line, directory.path()));
  EXPECT_THAT(lines_with(outcome, "computing on the CPU"), ElementsAre(HasSubstr(why)));
  EXPECT_THAT(outcome.out, HasSubstr(", cpu, "));
}

TEST(Devices, AreMeasuredOneByOne) {
  const TemporaryDirectory directory;
  const auto outcome =
      ended_well(run_soft(with_nvml(kNobodyTells, "lockstep devices --measure --json"), directory.path()));
  const auto measured = json_in(outcome.out)["measured"];
  ASSERT_EQ(measured.size(), 3u) << outcome.out;
  for (int i = 0; i < 3; ++i) {
    const auto& rates = measured[static_cast<std::size_t>(i)];
    EXPECT_EQ(rates["device"], i < 2 ? "cuda:" + std::to_string(i) : "cpu");
    EXPECT_TRUE(rates["problem"].is_null()) << rates;
    EXPECT_GT(rates["copy_bytes_per_s"], 0.0);
    if (i == 2) continue;
    ASSERT_EQ(rates["products"].size(), 3u);
    EXPECT_EQ(rates["products"][0]["precision"], "bf16");
    EXPECT_EQ(rates["products"][1]["precision"], "f32");
    EXPECT_EQ(rates["products"][2]["precision"], "tf32");
  }
}

TEST(AutoDevice, IsTheCpuWhereGpusAreTooFew) {
  expect_cpu(with_nvml(kNobodyTells, launched_with(3, "")), "3 ranks on host ");
  expect_cpu(with_nvml("compute_modes", launched_with(2, "--device auto")),
             "GPU 1 (NVIDIA H100 80GB HBM3, 0000:1c:00.0)");
}

TEST(AutoDevice, TheCpuIsTakenInSilenceWhereItIsAskedFor) {
  const TemporaryDirectory directory;
  const auto outcome = ended_well(run_soft(launched_with(2, "--device cpu"), directory.path()));
  EXPECT_THAT(outcome.out + outcome.err, Not(HasSubstr("computing on the CPU")));
}

// One process, all GPUs: what the same number of CPU devices computes.
TEST(SeveralGpus, TrainAsCpuDevicesDo) {
  const TemporaryDirectory directory;
  for (const std::string model : {"cnn", "lstm --width 16"}) {
    const auto trained = [&](const std::string& devices) {
      ended_well(run_soft(
          with_nvml(kNobodyTells, "lockstep train " + model + " --data digits --global-batch 50 --steps 6 --quiet " +
                                      "--eval-every 0 --parallel dp --metrics m.jsonl --device " + devices),
          directory.path()));
      return read_metrics(directory.path() / "m.jsonl").losses;
    };
    const auto wanted = trained("cpu:0,1"), got = trained("cuda"), turned = trained("cuda:1,0");
    ASSERT_EQ(wanted.size(), 6u);
    ASSERT_EQ(got.size(), 6u);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-4 * wanted[i]) << model << i;
    EXPECT_EQ(turned, got) << model;
  }
}

// Inference computes there, on a stream of its own for each thread.
// In shards: buckets and several partial sums of one GPU make no difference, and threads are none of its settings.
TEST(AGpu, TrainsInShards) {
  const TemporaryDirectory directory;
  std::vector<std::string> hashes;
  for (const char* buckets : {"25", "0.001"}) {
    ended_well(
        run_soft("lockstep train mlp --hidden 16 --data digits --steps 2 --shards 5 --batch 2 --clip-norm 1 "
                 "--device cuda --quiet --metrics m.jsonl --bucket-mb " +
                     std::string(buckets),
                 directory.path()));
    hashes.push_back(read_metrics(directory.path() / "m.jsonl").final["params_sha256"]);
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(Inference, ReportsItsDevice) {
  const TemporaryDirectory directory;
  const auto synthetic = run_soft(
      with_nvml(kNobodyTells, "lockstep infer linear --input random:3x5,4 --device cuda:1 --threads 2 --quiet"),
      directory.path());
  EXPECT_EQ(synthetic.out, "[3, 10], cuda:1\n[3, 10], cuda:1\n[3, 10], cuda:1\n[3, 10], cuda:1\n") << synthetic.err;
  EXPECT_THAT(
      run_soft(with_nvml(kNobodyTells, "lockstep infer linear --input random:3x5 --device cuda:3"), directory.path()),
      fails_with(4, "there is no GPU 3"));
}

TEST(SeveralGpus, TheEmptiest) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train linear --data random:5,64 --steps 2 --parallel dp --device cuda:free";
  // GPU 1 has more free memory, and takes nobody.
  const auto outcome = ended_well(run_soft(with_nvml("compute_modes", train), directory.path()));
  EXPECT_THAT(outcome.out + outcome.err, AllOf(HasSubstr("cuda:0: "), Not(HasSubstr("cuda:1"))));
  EXPECT_THAT(run_soft(with_nvml(kNobodyTells, train), directory.path()),
              fails_with(4, "free memory of the GPUs is not known"));
}

TEST(Inference, SpreadsStreamsOverGpus) {
  const TemporaryDirectory directory;
  const auto outcome = ended_well(run_soft(
      with_nvml(kNobodyTells, "lockstep infer linear --input random:3x5,40 --device cuda:1,0 --batch 3 --json"),
      directory.path()));
  EXPECT_THAT(outcome.out, HasSubstr(R"("device":"cuda:1,0","streams":2,"batch":3)"));
  EXPECT_EQ(lines_of(outcome.out).size(), 41u);
  EXPECT_THAT(run_soft(with_nvml(kNobodyTells, "lockstep infer linear --input random:3x5,4 --device cuda:0,2"),
                       directory.path()),
              fails_with(4, "there is no GPU 2"));
}

/// The probabilities of all classes for each image, by its name.
std::map<std::string, std::vector<double>> probabilities_in(const Outcome& outcome) {
  std::map<std::string, std::vector<double>> all;
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const auto& event : events_of(outcome.out)) {
    if (event["event"] != "image") continue;
    auto& probabilities = all[event["input"].get<std::string>()];
    probabilities.resize(event["classes"].size());
    for (const auto& one : event["classes"]) probabilities[one["class"]] = one["probability"];
  }
  return all;
}

// Batches of images on two GPUs: what the CPU says of each image by itself.
TEST(Inference, ClassifiesBatchesOnGpusAsTheCpuDoes) {
  const TemporaryDirectory directory;
  ended_well(run_soft("lockstep train cnn --data digits --epochs 2 --device cpu --quiet --save d.safetensors",
                      directory.path()));
  const std::string infer =
      "lockstep infer cnn --weights d.safetensors --input " LOCKSTEP_SOURCE_DIR "/tests/data/golden --top 10 --json ";
  const auto wanted = probabilities_in(run_soft(infer + "--device cpu", directory.path()));
  ASSERT_GT(wanted.size(), 4u);
  for (const char* flags : {"--device cuda:0,1 --batch 3", "--device cuda:1,0 --batch 2 --threads 3"}) {
    const auto got = probabilities_in(run_soft(with_nvml(kNobodyTells, infer + flags), directory.path()));
    ASSERT_EQ(got.size(), wanted.size());
    for (const auto& [image, probabilities] : wanted) {
      ASSERT_EQ(got.count(image), 1u) << image;
      for (std::size_t i = 0; i < probabilities.size(); ++i)
        EXPECT_NEAR(got.at(image)[i], probabilities[i], 1e-4) << flags << image << i;
    }
  }
}

TEST(Inference, TakesImageNetsModelsToTheFourthOfFour) {
  const TemporaryDirectory directory;
  for (const char* visible : {"", "CUDA_VISIBLE_DEVICES=0,1,2,3 "}) {
    const auto outcome = run_soft(
        with_nvml(kNobodyTells, std::string("LOCKSTEP_TEST_GPUS=4 ") + visible +
                                    "lockstep infer resnet18 --input random:1x3x64x64 --device cuda:3 --quiet"),
        directory.path());
    EXPECT_EQ(outcome.out, "[1, 1000], cuda:3\n") << outcome.err;
  }
}

TEST(Inference, ContinuesATextAsTheCpuDoes) {
  const TemporaryDirectory directory;
  std::string text;
  for (int i = 0; i < 60; ++i) text += "a quick dog. ";
  std::ofstream(directory.path() / "text.txt") << text;
  ended_well(run_soft(
      "lockstep train gpt --data text:text.txt --layers 1 --heads 2 --width 16 --context 8 --steps 60 --batch 8 "
      "--lr 0.01 --device cpu --quiet --save text.safetensors",
      directory.path()));
  const std::string infer =
      "lockstep infer gpt --weights text.safetensors --prompt \"a quick\" --tokens 20 --samples 2 --temperature 0.1 "
      "--threads 2 --quiet --device ";
  const auto on_cpu = run_soft(infer + "cpu", directory.path());
  for (const char* devices : {"cuda:1", "cuda:1,0"}) {
    const auto on_gpu = ended_well(run_soft(with_nvml(kNobodyTells, infer + devices), directory.path()));
    EXPECT_EQ(on_gpu.out, on_cpu.out) << devices;
  }
  EXPECT_EQ(lines_of(on_cpu.out).size(), 3u);
}

}  // namespace
}  // namespace lockstep::testing
