// --comm-hook: what training is like with each hook, what it reports, how it resumes, and what it does not go with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kHooks[] = {"bf16", "bf16:exact", "fp16", "powersgd:2", "topk:5"};

Metrics trained(int ranks, const std::string& options, const fs::path& directory, std::string* output = nullptr) {
  const auto outcome = run_well(
      on_ranks(ranks) + "lockstep train " + options + " --threads 1 --check-replicas 1 --metrics m.jsonl", directory);
  if (output != nullptr) *output = outcome.out + outcome.err;
  return read_metrics(directory / "m.jsonl");
}

// Of all ranks alike, with fewer bytes; what only rounds stays near the losses of a run without.
TEST(CommHook, TrainsWithFewerBytes) {
  const TemporaryDirectory directory;
  const std::string options = "cnn --data digits --epochs 2 --global-batch 60 --seed 3";
  const Metrics none = trained(2, options, directory.path());
  ASSERT_FALSE(none.losses.empty());
  EXPECT_FALSE(none.final.contains("comm_hook"));
  for (const std::string hook : kHooks) {
    std::string output;
    const Metrics with = trained(2, options + " --comm-hook " + hook, directory.path(), &output);
    ASSERT_EQ(with.losses.size(), none.losses.size());
    EXPECT_EQ(with.final["comm_hook"], hook);
    EXPECT_EQ(with.final["comm_fallbacks"], 0);
    EXPECT_LE(with.final["comm_bytes"].get<double>(), 0.5 * with.final["comm_bytes_without_hook"].get<double>());
    EXPECT_THAT(output, HasSubstr(hook + ": a rank sends "));
    EXPECT_LT(with.losses.back(), with.losses.front()) << hook;
    if (hook.starts_with("powersgd") || hook.starts_with("topk")) continue;
    for (std::size_t i = 0; i < none.losses.size(); ++i)
      EXPECT_NEAR(with.losses[i], none.losses[i], 0.05 * none.losses[i]) << hook << " step " << i + 1;
  }
}

// Buckets of one slot, ranks without samples, parts, parameters that may be unused, and one rank alone.
TEST(CommHook, OddSteps) {
  const TemporaryDirectory directory;
  for (const std::string hook : kHooks) {
    const std::string with = " --comm-hook " + hook;
    for (const auto& [ranks, options] :
         {std::pair{3, "cnn --data digits --steps 6 --global-batch 2 --bucket-mb 0.0003 --first-bucket-mb 0.0003"},
          std::pair{2, "mlp --hidden 16 --data digits --steps 6 --global-batch 30 --accumulate 4 --find-unused"},
          std::pair{2, "linear --in 1 --out 1 --data random:1,64 --steps 4 --batch 4"},
          std::pair{1, "cnn --data digits --steps 6"}}) {
      const Metrics metrics = trained(ranks, options + with, directory.path());
      EXPECT_EQ(metrics.final.contains("comm_hook"), ranks > 1) << options << with;
    }
  }
}

// One rank sends nothing: its bits are those without a hook.
TEST(CommHook, OfOneRankChangesNothing) {
  const TemporaryDirectory directory;
  const std::string options = "cnn --data digits --steps 6";
  const Metrics none = trained(1, options, directory.path());
  for (const std::string hook : kHooks)
    EXPECT_EQ(trained(1, options + " --comm-hook " + hook, directory.path()).final["params_sha256"],
              none.final["params_sha256"])
        << hook;
}

// Other numbers of ranks, and other hooks, resume a checkpoint, and say what becomes of what it has. One whose file is
// cut is none.
TEST(CommHook, ResumesOnOtherRanks) {
  const TemporaryDirectory directory;
  const std::string options =
      "cnn --data digits --global-batch 60 --steps 12 --checkpoint-dir c --checkpoint-every 6 --keep 0 --comm-hook ";
  std::string output;
  trained(3, options + "topk:5", directory.path());
  const auto again = [&](int ranks, const std::string& hook) {
    fs::remove_all(directory.path() / "c" / "step-0000000012");
    trained(ranks, options + hook + " --resume auto", directory.path(), &output);
    return output;
  };
  EXPECT_THAT(again(2, "topk:5"),
              HasSubstr("topk:5: gradients that 3 ranks had not sent yet are divided among 2: the sum stays"));
  EXPECT_THAT(again(1, "topk:5"), HasSubstr("gradients that 3 ranks had not sent yet are divided among 1"));
  EXPECT_THAT(again(3, "powersgd:2"),
              AllOf(HasSubstr("comm-hook topk:5 there and powersgd:2 here"),
                    HasSubstr("without communication hook powersgd:2, which starts without state")));
  EXPECT_THAT(again(3, "none"), HasSubstr("comm-hook topk:5 there and none here"));
  const fs::path file = directory.path() / "c" / "step-0000000006" / "hook.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  fs::remove_all(directory.path() / "c" / "step-0000000012");
  EXPECT_THAT(run(on_ranks(3) + "lockstep train " + options + "topk:5 --resume auto --quiet", directory.path()),
              fails_with(6, "hook.safetensors"));
}

// No matrix is large enough, or ranks together send more than all.
TEST(CommHook, HookWithoutSavingsIsAWarning) {
  const TemporaryDirectory directory;
  for (const std::string hook : {"powersgd:1000", "topk:50"}) {
    std::string output;
    trained(2, "cnn --data digits --steps 2 --comm-hook " + hook, directory.path(), &output);
    EXPECT_THAT(output, HasSubstr("--comm-hook " + hook + " saves nothing here: for cnn on 2 ranks it sends"));
  }
}

TEST(CommHook, IsMeasured) {
  const TemporaryDirectory directory;
  for (const std::string hook : {"bf16", "topk:1"}) {
    const auto outcome = run_well(on_ranks(2) +
                                      "lockstep bench step mlp --batch 4 --steps 3 --warmup-steps 4 --json "
                                      "--comm-hook " +
                                      hook,
                                  directory.path());
    const auto result = json_in(outcome.out);
    EXPECT_EQ(result["comm_hook"], hook);
    EXPECT_LE(result["comm_bytes"].get<double>(), 0.5 * result["comm_bytes_without_hook"].get<double>());
  }
}

}  // namespace
}  // namespace lockstep::testing
