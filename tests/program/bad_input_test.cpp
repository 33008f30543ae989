// What the program says to bad input: one line with cause and remedy, and the documented exit code.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

struct BadInput {
  std::string line;
  int code;
  std::string says;  // on its one line
};

class BadInputTest : public ::testing::TestWithParam<BadInput> {};

// The error lines among what a run wrote to stderr, without the launcher's account of the failure.
std::vector<std::string> error_lines(const std::string& err) {
  std::vector<std::string> errors;
  for (const auto& line : lines_of(err))
    if (line.find("error: ") != std::string::npos && line.find("lockstep:   |") == std::string::npos)
      errors.push_back(line);
  return errors;
}

TEST_P(BadInputTest, IsOneLineWithARemedy) {
  const TemporaryDirectory directory;
  // Files that some of the cases name.
  std::ofstream(directory.path() / "cut.safetensors") << "1234";
  std::ofstream(directory.path() / "hosts.txt") << "a slots=2\n# b\nc slotz=2\n";
  std::ofstream(directory.path() / "typo.toml") << "data = \"digits\"\nepocs = 3\n";
  const auto outcome = run(GetParam().line, directory.path());
  EXPECT_EQ(outcome.code, GetParam().code) << outcome.out << outcome.err;
  const auto errors = error_lines(outcome.err + outcome.out);
  ASSERT_EQ(errors.size(), 1u) << outcome.out << outcome.err;
  EXPECT_NE(errors[0].find(GetParam().says), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("→"), std::string::npos) << errors[0];
}

INSTANTIATE_TEST_SUITE_P(
    Alone, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep trian cnn --data digits", 2, "did you mean lockstep train"},
        BadInput{"lockstep train cn --data digits", 2, "did you mean"},
        BadInput{"lockstep train cnn --data digts", 2, "did you mean"},
        BadInput{"lockstep train cnn --data digits --bach 3", 2, "did you mean --batch"},
        BadInput{"lockstep train cnn --data digits --batch 0", 2, "--batch"},
        BadInput{"lockstep train cnn --data digits --batch 3 --global-batch 9", 2, "--global-batch"},
        BadInput{"lockstep train cnn --data digits --lr fast", 2, "--lr"}, BadInput{"lockstep train cnn", 2, "data"},
        BadInput{"lockstep train cnn --config typo.toml", 2, "typo.toml"},
        BadInput{"LOCKSTEP_EPOCS=3 lockstep train cnn --data digits", 2, "LOCKSTEP_EPOCS"},
        BadInput{"lockstep train cnn --data digits --zero 1", 2, "--zero"},
        BadInput{"lockstep train cnn --data random:5,100", 2, "4x4"},
        BadInput{"lockstep train linear --data digits --out 3", 2, "10 classes"},
        BadInput{"lockstep train cnn --data digits --global-batch 2000 --tail drop", 2, "drop"},
        BadInput{"lockstep train cnn --data random:5,0", 3, "empty"},
        BadInput{"lockstep train cnn --data mnist:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data cifar10:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data images:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep train cnn --data images:.", 3, "holds no folders"},
        BadInput{"lockstep train cnn --data digits --image-size 64", 2, "--image-size"},
        BadInput{"lockstep train cnn --data digits --weights none.safetensors", 3, "none.safetensors"},
        BadInput{"lockstep train cnn --data digits --weights cut.safetensors", 3, "byte 4"},
        BadInput{"lockstep train cnn --data digits --metrics none/m.jsonl", 3, "none/m.jsonl"},
        BadInput{"lockstep train cnn --data digits --epochs 1 --quiet --metrics /dev/full", 3, "/dev/full"},
        // Before it trains, not hours later.
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save none/w.safetensors", 3, "none/w.safetensors"},
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save .", 3, "regular file"},
        BadInput{"lockstep train cnn --data digits --epochs 100000 --save /dev/null", 3, "regular file"},
        BadInput{"lockstep train cnn --data digits --bucket-mb 1e300", 2, "--bucket-mb"},
        BadInput{"lockstep train cnn --data digits --clip-norm nan", 2, "--clip-norm"},
        BadInput{"lockstep train linear --data random:1,4000000000000000000 --global-batch 1 --epochs 9", 2,
                 "--epochs"},
        BadInput{"lockstep train linear --data random:1,40000000 --global-batch 40000000", 2,
                 "a step of 40000000 samples"},
        BadInput{"lockstep train cnn --data digits --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep train cnn --data digits --device cuda:9", 4, "--device cuda:9: "},
        BadInput{"lockstep train cnn --data digits --device cuda:free", 4, "--device cuda:free"},
        BadInput{"lockstep bench step cnn --device cuda", 4, "--device cuda: "},
        BadInput{"LOCKSTEP_DEVICE=cuda lockstep train cnn --data digits", 4, "--device cuda: "},
        BadInput{"lockstep train cnn --data digits --device tpu", 2, "tpu"},
        BadInput{"lockstep train cnn --data digits --device gpu", 2, "did you mean 'cuda'"},
        BadInput{"lockstep train cnn --data digits --device cpu:0,x", 2, "'x' is no number of a CPU device"},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cpu:0,1,0", 2, "names CPU device 0 twice"},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cuda:0,9", 4, "--device cuda:0,9: "},
        BadInput{"lockstep train cnn --data digits --parallel dp --device cuda:free", 2, "takes all GPUs"},
        BadInput{"lockstep train cnn --data digits --parallel dp --sync-batchnorm", 2, "--sync-batchnorm with"},
        BadInput{"lockstep train cnn --data digits --parallel pp", 2, "did you mean dp"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cpu:1", 2, "on 1 device"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cpu:1,1", 2, "names CPU device 1 twice"},
        BadInput{"lockstep bench dp-vs-ddp cn", 2, "did you mean"},
        BadInput{"lockstep bench dp-vs-ddp cnn --global-batch 2 --device cpu:0,1,2", 2, "2 samples for 3 devices"},
        BadInput{"lockstep bench dp-vs-ddp cnn --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep bench dp-vs-ddp mlp --hidden 8 --lr 1e30", 7, "NaN or infinite"},
        BadInput{"RANK=0 WORLD_SIZE=2 lockstep bench dp-vs-ddp cnn", 2, "without a launcher"},
        BadInput{"lockstep train cnn --data digits --device cuda:0,x", 2, "'x' is no number of a GPU"},
        BadInput{"lockstep train cnn --data digits --device cuda:0,0", 2, "names GPU 0 twice"},
        BadInput{"lockstep train cnn --data digits --device cuda --backend mpi", 2, "travel over NCCL"},
        BadInput{"lockstep train cnn --data digits --device cpu --backend nccl", 2, "--backend nccl"},
        BadInput{"lockstep train cnn --data digits --backend nccl", 2, "on the CPU ("},
        BadInput{"lockstep train cnn --data digits --device cpu --precision bf16", 2,
                 "bf16 is computed on GPUs only, in this version"},
        BadInput{"lockstep train cnn --data digits --precision bf16", 2, "on the CPU ("},
        BadInput{"lockstep train cnn --data digits --tf32", 2, "--tf32 is for GPUs"},
        BadInput{"lockstep train cnn --data digits --precision fp16", 2, "did you mean bf16"},
        BadInput{"lockstep bench allreduce --backend nccl", 2, "--backend nccl"},
        BadInput{"lockstep train cnn --data digits --quiet --lr 1e30", 7, "at step 2"},
        BadInput{"lockstep train cnn --data digits --quiet --lr 1e30 --steps 1 --save w", 7, "evaluation loss"},
        BadInput{"RANK=0 WORLD_SIZE=2 MASTER_PORT=70000 lockstep train cnn --data digits", 2, "MASTER_PORT"},
        BadInput{"RANK=1 WORLD_SIZE=2 MASTER_ADDR=no.such.host.invalid lockstep train cnn --data digits", 2,
                 "no.such.host.invalid"},
        BadInput{"RANK=1 WORLD_SIZE=2 MASTER_PORT=1 lockstep train cnn --data digits --timeout-seconds 0.5", 5,
                 "rank 0 did not come to 127.0.0.1:1"},
        BadInput{"RANK=2 WORLD_SIZE=2 lockstep train cnn --data digits", 2, "RANK"}));

// On several ranks the same fault is still one line, and the code is the rank's own.
INSTANTIATE_TEST_SUITE_P(
    OnRanks, BadInputTest,
    ::testing::Values(
        BadInput{"lockstep launch -n 2 --no-prefix -- lockstep train cnn --data digits --parallel dp", 2,
                 "--parallel dp is one process for all devices, and this is one of 2"},
        BadInput{"lockstep launch -n 2 --no-prefix -- lockstep train cnn --data digits --device cpu:3", 4,
                 "local rank 1"},
        BadInput{"lockstep launch -n 3 -- lockstep train cnn --data digits --bach 3", 2, "--batch"},
        BadInput{"lockstep launch --hostfile hosts.txt -- true", 2, "hosts.txt:3: "},
        BadInput{"lockstep launch --hosts localhost:2 -n 3 -- true", 2, "3 ranks, but the hosts have 2 slots"},
        BadInput{"lockstep launch --hosts no.such.host.invalid:2 -- true", 4, "host no.such.host.invalid: its name"},
        BadInput{"lockstep launch -n 3 -- lockstep train cnn --data mnist:/nowhere", 3, "/nowhere"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --quiet --lr 1e30", 7, "at step 2"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda", 4, "--device cuda: "},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda:0,9", 4,
                 "--device cuda:0,9: "},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --backend nccl", 2, "--backend nccl"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --precision bf16", 2,
                 "bf16 is computed on GPUs only, in this version"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --device cuda:0,0", 2, "twice"},
        BadInput{"lockstep launch -n 2 -- lockstep train cnn --data digits --global-batch 3 --tail pad", 2, "pad"},
        BadInput{"lockstep launch -n 2 -- bash -c \"exec lockstep train cnn --data digits --lr "
                 "0.\\$((OMPI_COMM_WORLD_RANK+1))\"",
                 5, "lr"},
        BadInput{"lockstep launch -n 2 -- bash -c \"exec lockstep train mlp --data digits --hidden "
                 "16,\\$((OMPI_COMM_WORLD_RANK+8))\"",
                 5, "parameter 2=fc2.weight f32 [9, 16]"}));

TEST(DeviceTest, WhatOneRankAsksForInVainEndsAll) {
  const TemporaryDirectory directory;
  const auto outcome =
      run("lockstep launch -n 2 -- bash -c \"exec lockstep train cnn --data digits --precision "
          "\\$([ \\$OMPI_COMM_WORLD_RANK = 0 ] && echo f32 || echo bf16)\"",
          directory.path());
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_EQ(error_lines(outcome.err + outcome.out).size(), 1u) << outcome.out << outcome.err;
}

// What keeps this program from using a GPU, on machines that are known to have none for it.
TEST(DeviceTest, WhyThereIsNone) {
  const TemporaryDirectory directory;
  const auto outcome = run("lockstep train cnn --data digits --device cuda", directory.path());
  const bool built = run("lockstep version", directory.path()).out.find("nccl") != std::string::npos;
  std::vector<std::string> reasons = {"no NVIDIA driver is loaded", "no GPU is visible to this process",
                                      "the NVIDIA driver runs CUDA up to"};
  if (!built) reasons = {"this build computes on the CPU only"};
  EXPECT_TRUE(std::ranges::any_of(reasons, [&](const std::string& reason) {
    return outcome.err.find("error: --device cuda: " + reason) != std::string::npos;
  })) << outcome.err;
}

TEST(OutputTest, OfALaunchThatIsLostIsNoSuccess) {
  const TemporaryDirectory directory;
  const auto outcome = run("lockstep launch -n 1 -- echo hello >/dev/full", directory.path());
  EXPECT_EQ(outcome.code, 3);
  EXPECT_NE(outcome.err.find("output was lost: No space left"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::testing
