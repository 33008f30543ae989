// mobilenet-v2, whose convolutions are depthwise, as the program trains it: the same bits on any number of ranks, and
// its weights in a file.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class MobileNet : public ::testing::Test {
 protected:
  /// `lockstep train mobilenet-v2 ARGUMENTS` on `ranks` ranks, of a small one.
  Metrics train(int ranks, const std::string& arguments) {
    run_well(on_ranks(ranks) + "lockstep train mobilenet-v2 --width-multiplier 0.35 --threads 1 --quiet " +
                 "--check-replicas 1 --metrics m.jsonl " + arguments,
             directory_.path());
    return read_metrics(directory_.path() / "m.jsonl");
  }

  TemporaryDirectory directory_;
};

TEST_F(MobileNet, HasTheSameBitsOnAnyRanksInShards) {
  const std::string random = "--data random:3x33x40,36 --global-batch 12 --shards 6 --steps 2 --lr 0.01";
  std::vector<std::string> precisions = {"f32"};
  if (bf16_of_cpu().starts_with("AVX512-BF16")) precisions.emplace_back("bf16");
  std::vector<double> first;
  for (const std::string& precision : precisions) {
    const std::string same = random + " --precision " + precision;
    const Metrics alone = train(1, same);
    first.push_back(alone.losses.at(0));
    EXPECT_NEAR(first.back(), first.front(), 0.02 * first.front()) << precision;
    for (const int ranks : {2, 3}) {
      const Metrics together = train(ranks, same);
      EXPECT_EQ(together.final["params_sha256"], alone.final["params_sha256"]) << ranks << " ranks, " << precision;
      EXPECT_EQ(together.losses, alone.losses) << ranks << " ranks, " << precision;
    }
    EXPECT_EQ(train(2, same + " --zero 1 --recompute blocks").final["params_sha256"], alone.final["params_sha256"])
        << precision;
  }
}

TEST_F(MobileNet, IsResumedOnOtherRanksWithTheSameBits) {
  const std::string same = "--data random:3x64x64,36 --global-batch 6 --shards 3 --lr 0.01 --clip-norm 1 ";
  const auto straight = train(1, same + "--steps 4").final["params_sha256"];
  train(2, same + "--steps 2 --checkpoint-dir kept");
  EXPECT_EQ(train(3, same + "--steps 4 --checkpoint-dir kept --resume auto").final["params_sha256"], straight);
}

TEST_F(MobileNet, TrainsOnDevicesOfOneProcess) {
  const Metrics parts =
      train(1, "--data random:3x32x32,24 --batch 6 --steps 3 --lr 1e-3 --parallel dp --device cpu:0,1");
  EXPECT_EQ(parts.losses.size(), 3u);
  for (const double loss : parts.losses) EXPECT_LT(loss, 10.0);
}

TEST_F(MobileNet, IsSavedEvaluatedInferredAndContinued) {
  const fs::path golden = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/data/golden";
  for (const std::string folder : {"train/cat", "train/dog", "val/cat", "val/dog"}) {
    fs::create_directories(directory_.path() / "animals" / folder);
    for (int i = 0; i < 3; ++i)
      fs::copy_file(golden / "rgb.png", directory_.path() / "animals" / folder / fmt::format("{}.png", i));
  }
  const std::string data = "--data images:animals --image-size 40 ";
  const Metrics trained = train(1, data + "--batch 4 --steps 2 --augment no --save small.safetensors");
  const double loss = trained.final["loss"];
  const auto evaluated = run_well("lockstep eval mobilenet-v2 --weights small.safetensors --json --data images:animals",
                                  directory_.path());
  EXPECT_NEAR(json_in(evaluated.out)["loss"].get<double>(), loss, 1e-5 * loss);
  const auto inferred = run_well(
      "lockstep infer mobilenet-v2 --weights small.safetensors --input animals/val/cat/0.png", directory_.path());
  EXPECT_THAT(inferred.out, HasSubstr("cat"));
  const Metrics still =
      train(1, data + "--batch 4 --steps 1 --lr 0 --weight-decay 0 --augment no --weights small.safetensors");
  EXPECT_EQ(still.final["params_sha256"], trained.final["params_sha256"]);
  train(2, data + "--batch 4 --steps 1 --weights small.safetensors --reset-head --freeze 'features.*'");
  expect_refused(
      {"lockstep train mobilenet-v2 --width-multiplier 0.5 --weights small.safetensors " + data, 2, "width-multiplier"},
      directory_.path());
}

}  // namespace
}  // namespace lockstep::testing
