// Training on several ranks over NCCL's group, on GPUs and an NCCL in software: against the same ranks on the CPU, and
// from graphs against kernel by kernel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/refusal.h"
#include "tests/trainer/nccl_training.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::group;
using ::testing::HasSubstr;

class NcclStep : public ::testing::TestWithParam<soft_cuda::Streams> {
 protected:
  void SetUp() override {
    comm::fake_nccl::reset();
    soft_cuda::set_streams(GetParam());
    // As NCCL does it: no call has come to its end when it returns.
    comm::fake_nccl::script().looks_in_progress = 1;
  }
  void TearDown() override {
    EXPECT_EQ(comm::fake_nccl::counts().aborts, aborts_);
    EXPECT_EQ(comm::fake_nccl::counts().calls_in_progress, 0);
    soft_cuda::set_streams(soft_cuda::Streams::kEager);
  }
  /// Threads run the device's work in more orders than streams that run at once: settings multiply there.
  static bool skips_half() { return GetParam() == soft_cuda::Streams::kEager; }
  int aborts_ = 0;
};

TEST_P(NcclStep, FollowsTheRanksOnTheCpu) {
  for (const double clip : {0.0, 0.5}) {
    NcclTraining cpu({.cuda = false, .clip_norm = clip});
    NcclTraining cuda({.clip_norm = clip});
    const auto wanted = cpu.run(12), got = cuda.run(12);
    EXPECT_GT(cuda.graphs().replayed(), 3);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].totals.count, wanted[i].totals.count);
      EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-4 * wanted[i].totals.loss) << "step " << i + 1;
      EXPECT_NEAR(got[i].grad_norm, wanted[i].grad_norm, 1e-3 * wanted[i].grad_norm) << "step " << i + 1;
    }
  }
}

// Captured or not, with the same bits on all ranks; near those of the same hook on the CPU, whose sums round elsewhere.
TEST_P(NcclStep, HooksRoundThere) {
  for (const char* hook : {"bf16", "fp16"}) {
    SCOPED_TRACE(hook);
    NcclTraining cpu({.cuda = false, .hook = hook}), eager({.capture = false, .hook = hook}), captured({.hook = hook});
    const auto wanted = cpu.run(12), got = eager.run(12), again = captured.run(12);
    EXPECT_EQ(captured.graphs().refusal(), "");
    EXPECT_GT(captured.graphs().replayed(), 3);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-2 * wanted[i].totals.loss) << "step " << i + 1;
      ASSERT_EQ(again[i].totals.loss, got[i].totals.loss) << "step " << i + 1;
    }
    EXPECT_EQ(captured.hash(), eager.hash());
    EXPECT_THAT(group().all_gather_text(captured.hash()), Each(eager.hash()));
    EXPECT_NE(eager.hash(), NcclTraining({.capture = false}).hash());
  }
}

TEST_P(NcclStep, HooksOfTheCpuAreRefused) {
  const auto backend = nn::make_cuda_backend({});
  const auto gpus =
      comm::make_nccl_group(group(), {.producer = backend->stream(), .timeout = kPatience}, &comm::fake_nccl::api());
  for (const char* spec : {"powersgd:2", "topk:1"}) {
    const auto hook = ddp::make_comm_hook(spec);
    EXPECT_THAT(testing::refusal_of([&] { hook->check(*gpus); }),
                AllOf(HasSubstr(spec), HasSubstr("its arithmetic is the CPU's")));
  }
  gpus->shutdown();
}

TEST_P(NcclStep, StepGraphsMatchEagerSteps) {
  NcclTraining eager({.capture = false, .clip_norm = 1.0});
  NcclTraining captured({.clip_norm = 1.0});
  const auto wanted = eager.run(20), got = captured.run(20);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GT(captured.graphs().replayed(), 10);
  EXPECT_EQ(eager.graphs().replayed(), 0);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    ASSERT_EQ(got[i].grad_norm, wanted[i].grad_norm) << "step " << i + 1;
  }
  EXPECT_EQ(captured.hash(), eager.hash());
  EXPECT_THAT(group().all_gather_text(captured.hash()), Each(eager.hash()));
}

// ZeRO: collectives of the update are in the graph, too; in bf16 the copies of what other ranks have updated are made
// anew. An evaluation in between reads them.
TEST_P(NcclStep, StepGraphsOfShardedUpdatesMatchEagerSteps) {
  for (const DType activations : {DType::kF32, DType::kBF16})
    for (const double clip : {0.0, 1.0}) {
      if (skips_half() && (activations == DType::kF32) == (clip > 0)) continue;
      const NcclSetting setting = {.clip_norm = clip, .hidden = {160, 24}, .zero = 1, .activations = activations};
      NcclSetting by_itself = setting;
      by_itself.capture = false;
      NcclTraining eager(by_itself), captured(setting);
      for (int round = 0; round < 2; ++round) {
        const auto wanted = eager.run(9), got = captured.run(9);
        for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << i + 1;
        EXPECT_EQ(captured.evaluate(), eager.evaluate());
      }
      EXPECT_EQ(captured.graphs().refusal(), "");
      EXPECT_GT(captured.graphs().replayed(), 5);
      EXPECT_EQ(captured.hash(), eager.hash());
    }
}

// All ranks find the same gradients too large, whatever carries and updates them: of clipped, of compressed and of
// sharded ones.
TEST_P(NcclStep, RanksSkipTheSameStepsFromGraphsToo) {
  NcclSetting base = {.hidden = {160, 24}, .activations = DType::kF16};
  base.scaling = nn::GradScaler::Options{.initial_scale = 0x1p30, .growth_interval = 3};
  std::vector<NcclSetting> settings(5, base);
  settings[1].clip_norm = 0.5;
  settings[2].hook = "fp16";
  settings[3].hook = "bf16";
  settings[4].zero = 1;
  for (std::size_t number = 0; number < settings.size(); ++number) {
    if (skips_half() && number % 2 == 0) continue;
    const NcclSetting& setting = settings[number];
    SCOPED_TRACE(fmt::format("clip {} hook {} zero {}", setting.clip_norm, setting.hook, setting.zero));
    NcclSetting by_itself = setting;
    by_itself.capture = false;
    NcclTraining eager(by_itself), captured(setting);
    const auto wanted = eager.run(24), got = captured.run(24);
    EXPECT_EQ(captured.graphs().refusal(), "");
    EXPECT_GT(captured.graphs().replayed(), 10);
    std::int64_t skipped = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
      ASSERT_EQ(got[i].scaling->scale, wanted[i].scaling->scale) << "step " << i + 1;
      skipped += got[i].scaling->skipped ? 1 : 0;
    }
    EXPECT_GT(skipped, 3);
    EXPECT_LT(skipped, 23);
    EXPECT_EQ(captured.optimizer_steps(), 24 - skipped);
    EXPECT_EQ(captured.hash(), eager.hash());
    EXPECT_THAT(group().all_gather_text(fmt::format("{} {}", captured.hash(), skipped)),
                Each(fmt::format("{} {}", eager.hash(), skipped)));
  }
}

// One sample: all ranks but the first capture that they contribute nothing.
TEST_P(NcclStep, RanksWithoutSamplesCaptureToo) {
  NcclTraining eager({.capture = false, .global_batch = 1});
  NcclTraining captured({.global_batch = 1});
  const auto wanted = eager.run(9), got = captured.run(9);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GT(captured.graphs().replayed(), 2);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].totals.count, 1);
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
  }
  EXPECT_THAT(group().all_gather_text(captured.hash()), Each(eager.hash()));
}

// The device repeats what it has captured, whatever step that is on the other ranks.
TEST_P(NcclStep, SkippedStepIsFoundAmongCapturedOnes) {
  aborts_ = 1;
  NcclTraining training({});
  training.run(20);
  EXPECT_GT(training.graphs().replayed(), 10);
  if (group().rank() == 1) training.leave_out_a_step();
  try {
    training.run(200);
    FAIL() << "nobody has seen it";
  } catch (const OutOfStepError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("out of step: rank 1 came to allreduce #"), HasSubstr(", step ")));
  }
  EXPECT_LE(training.steps(), 20 + 100 + 1) << "within a hundred steps";
}

constexpr std::size_t kRoom = 96 << 10;  // inputs, and less than a step or an evaluation takes

// The memory of graphs is kept for them. Where it is all that there is, the last step of an epoch and an evaluation
// need it: on one rank here, and no rank runs another step from a graph.
TEST_P(NcclStep, GraphsReleaseTheirMemoryOnAllRanks) {
  for (const bool evaluates : {false, true}) {
    SCOPED_TRACE(evaluates);
    const int before = 7;  // 1,437 digits: the eighth step is the last of an epoch
    NcclSetting setting = {.capture = false, .data = "digits", .global_batch = 180, .hidden = {256, 256}};
    std::vector<TrainingStep::Outcome> wanted;
    std::string hash;
    double loss = 0;
    {
      NcclTraining eager(setting);
      eager.run(before);
      if (evaluates) loss = eager.evaluate();
      wanted = eager.run(5);
      hash = eager.hash();
    }
    setting.capture = true;
    NcclTraining captured(setting);
    captured.run(before);
    const bool short_of_it = group().rank() + 1 == group().size();
    if (short_of_it) captured.leave_only(kRoom);
    EXPECT_EQ(captured.graphs().refusal(), "");
    EXPECT_GT(captured.graphs().replayed(), 0);
    EXPECT_EQ(evaluates ? captured.evaluate() : 0.0, loss);
    const auto got = captured.run(5);
    EXPECT_THAT(captured.graphs().refusal(), HasSubstr(short_of_it ? "was needed" : "another rank needed"));
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    EXPECT_EQ(captured.hash(), hash);
    soft_cuda::set_memory_bytes(soft_cuda::Machine{}.memory_bytes);
  }
}

// Under CUDA_MODULE_LOADING=LAZY a kernel's first launch may wait for collectives that are under way, in the first step
// and in the captured one: each rank has issued them by then, so none waits for a rank that waits for it.
TEST(NcclStepLoading, KernelsThatAreLoadedLateWaitForNoOtherRank) {
  comm::fake_nccl::reset();
  soft_cuda::set_machine({.streams = soft_cuda::Streams::kThreads, .lazy_loading = true});
  const auto before = soft_cuda::counts().loading_waits;
  {
    NcclTraining cpu({.cuda = false, .clip_norm = 0.5});
    NcclTraining cuda({.clip_norm = 0.5});
    const auto wanted = cpu.run(9), got = cuda.run(9);
    EXPECT_GT(cuda.graphs().replayed(), 0);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-4 * wanted[i].totals.loss) << "step " << i + 1;
  }
  EXPECT_GT(soft_cuda::counts().loading_waits, before);
  soft_cuda::set_streams(soft_cuda::Streams::kEager);
  soft_cuda::set_machine({});
}

INSTANTIATE_TEST_SUITE_P(Streams, NcclStep, ::testing::Values(soft_cuda::Streams::kEager, soft_cuda::Streams::kThreads),
                         [](const auto& test) {
                           return test.param == soft_cuda::Streams::kEager ? "eager" : "threads";
                         });

}  // namespace
}  // namespace lockstep::trainer
