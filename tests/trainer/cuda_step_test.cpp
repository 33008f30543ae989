// Training on a GPU against training on the CPU: the same steps, losses and parameters. Runs on the software device,
// and on a GPU where there is one.
#include "lockstep/nn/ops/transfer.h"
#include "tests/trainer/device_training.h"
#include "trainer/histogram.h"

namespace lockstep::trainer {
namespace {

class CudaStep : public ::testing::TestWithParam<std::string> {};

// f32: what differs is the order of sums, which training amplifies little over a few steps.
TEST_P(CudaStep, FollowsTheCpu) {
  for (const bool adam : {true, false})
    for (const double clip : {0.0, 0.5}) {
      if (GetParam() == "cnn" && adam == (clip > 0)) continue;  // slow in software
      Setting setting = {.model = GetParam(), .adam = adam, .clip_norm = clip};
      setting.lr = adam ? 1e-3 : 2e-2;
      Training cpu(setting);
      setting.cuda = true;
      Training cuda(setting);
      ASSERT_EQ(cpu.hash(), cuda.hash());
      const auto wanted = cpu.run(12), got = cuda.run(12);
      ASSERT_EQ(got.size(), wanted.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].step, wanted[i].step);
        EXPECT_EQ(got[i].totals.count, wanted[i].totals.count);
        EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-4 * wanted[i].totals.loss) << "step " << i + 1;
        EXPECT_NEAR(got[i].grad_norm, wanted[i].grad_norm, 1e-3 * wanted[i].grad_norm) << "step " << i + 1;
      }
      expect_close(cpu, cuda, adam ? 2e-3f : 1e-4f);
      EXPECT_NEAR(cuda.evaluate().loss, cpu.evaluate().loss, 1e-3 * cpu.evaluate().loss);
    }
}

// 189 samples in steps of 16 leave 13 for the last one of an epoch.
TEST_P(CudaStep, StepGraphsMatchEagerSteps) {
  Setting setting = {.cuda = true, .model = GetParam(), .clip_norm = 1.0, .capture = false, .global_batch = 16};
  setting.data = "random:1x8x8,189";
  Training eager(setting);
  setting.capture = true;
  Training captured(setting);
  const auto wanted = eager.run(18), got = captured.run(18);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GT(captured.graphs().replayed(), 10);
  EXPECT_EQ(eager.graphs().replayed(), 0);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    ASSERT_EQ(got[i].grad_norm, wanted[i].grad_norm) << "step " << i + 1;
  }
  EXPECT_EQ(captured.hash(), eager.hash());
  EXPECT_EQ(captured.evaluate().loss, eager.evaluate().loss);
  captured.run(3);  // evaluation has left the graphs' memory alone
  eager.run(3);
  EXPECT_EQ(captured.hash(), eager.hash());
}

// Histograms look at them then: of a step that was replayed, before clipping, multiplied by the losses' scale.
TEST_P(CudaStep, GradientsStayUntilTheNextStep) {
  for (const bool scaled : {false, true}) {
    Setting setting = {.cuda = true, .model = GetParam(), .clip_norm = 0.01};
    if (scaled) setting.activations = DType::kF16;
    if (scaled) setting.scaling.emplace();
    Training training(setting);
    const auto outcome = training.run(8).back();
    EXPECT_GT(training.graphs().replayed(), 0);
    double squares = 0;
    for (const auto& [name, parameter] : training.module().named_parameters())
      squares += histogram_of(nn::values_of(training.backend(), parameter->gradient()),
                              outcome.scaling ? 1 / outcome.scaling->scale : 1)
                     .squares;
    EXPECT_GT(outcome.grad_norm, 0.01);
    EXPECT_NEAR(std::sqrt(squares), outcome.grad_norm, 1e-5 * outcome.grad_norm);
  }
}

struct Learned {
  std::vector<TrainingStep::Outcome> outcomes;
  std::string hash;
  double accuracy = 0;
};

/// Thirty steps in f32, once for all that are compared with them.
const Learned& learned_in_f32(const std::string& model) {
  static std::map<std::string, Learned> known;
  if (!known.contains(model)) {
    Training f32({.cuda = true, .model = model});
    auto outcomes = f32.run(30);
    known[model] = {std::move(outcomes), f32.hash(), f32.evaluate().accuracy};
  }
  return known[model];
}

// bf16 has 8 bits of mantissa.
TEST_P(CudaStep, LearnsInBf16AsInF32) {
  const Learned& f32 = learned_in_f32(GetParam());
  Training bf16({.cuda = true, .model = GetParam(), .activations = DType::kBF16});
  const auto& wanted = f32.outcomes;
  const auto got = bf16.run(30);
  EXPECT_NEAR(got[0].totals.loss, wanted[0].totals.loss, 2e-2 * wanted[0].totals.loss);
  EXPECT_LT(got.back().totals.loss, 0.7 * got.front().totals.loss);
  EXPECT_NEAR(got.back().totals.loss, wanted.back().totals.loss, 0.15 * wanted.front().totals.loss);
  EXPECT_NE(bf16.hash(), f32.hash);
  EXPECT_NEAR(bf16.evaluate().accuracy, f32.accuracy, 0.1);
}

// f16 has 11 bits of mantissa, which scaled losses make use of.
TEST_P(CudaStep, LearnsInFp16AsInF32) {
  const Learned& f32 = learned_in_f32(GetParam());
  Setting setting = {.cuda = true, .model = GetParam(), .activations = DType::kF16};
  setting.scaling.emplace();
  Training f16(setting);
  const auto& wanted = f32.outcomes;
  const auto got = f16.run(30);
  EXPECT_NEAR(got[0].totals.loss, wanted[0].totals.loss, 2e-3 * wanted[0].totals.loss);
  EXPECT_NEAR(got[0].grad_norm, wanted[0].grad_norm, 2e-2 * wanted[0].grad_norm) << "of gradients that are not scaled";
  EXPECT_LT(got.back().totals.loss, 0.7 * got.front().totals.loss);
  EXPECT_NEAR(got.back().totals.loss, wanted.back().totals.loss, 0.05 * wanted.front().totals.loss);
  EXPECT_NE(f16.hash(), f32.hash);
  EXPECT_NEAR(f16.evaluate().accuracy, f32.accuracy, 0.1);
  ASSERT_TRUE(got.back().scaling);
  EXPECT_EQ(got.back().scaling->skipped_steps, 30 - f16.optimizer().steps());
}

// Without a scale gradients of f16 are lost that f32 has.
TEST_P(CudaStep, ScaledLossesKeepSmallGradientsOfF16) {
  if (GetParam() == "cnn") return;  // slow in software
  Setting setting = {.cuda = true, .model = GetParam(), .activations = DType::kF16, .global_batch = 1000};
  setting.scaling = nn::GradScaler::Options{.initial_scale = 0x1p-12};
  Training small(setting);
  setting.scaling = nn::GradScaler::Options{.initial_scale = 8192};
  Training large(setting);
  setting.activations = DType::kF32;
  Training f32(setting);
  const double lost = small.run(1)[0].grad_norm, kept = large.run(1)[0].grad_norm, exact = f32.run(1)[0].grad_norm;
  EXPECT_LT(std::abs(kept - exact), 1e-2 * exact);
  EXPECT_GT(std::abs(lost - exact), 2 * std::abs(kept - exact));
}

// The first steps have gradients that are infinite in f16: they change nothing, step by step and from graphs, whose
// replays count and scale as the device finds it.
TEST_P(CudaStep, StepsThatOverflowAreSkippedAlsoFromGraphs) {
  Setting setting = {.cuda = true, .model = GetParam(), .clip_norm = 1.0, .activations = DType::kF16, .capture = false};
  setting.scaling = nn::GradScaler::Options{.initial_scale = 0x1p30, .growth_interval = 2};
  setting.tail = sampler::Tail::kDrop;
  Training eager(setting);
  setting.capture = true;
  Training captured(setting);
  const int steps = GetParam() == "cnn" ? 12 : 30;
  const std::string before = eager.hash();
  auto wanted = eager.run(1);
  EXPECT_EQ(eager.hash(), before);
  EXPECT_TRUE(wanted[0].scaling->skipped);
  EXPECT_TRUE(std::isfinite(wanted[0].totals.loss));
  EXPECT_EQ(wanted[0].scaling->scale, 0x1p30);
  EXPECT_EQ(wanted[0].scaling->next_scale, 0x1p29);
  const auto rest = eager.run(steps - 1);
  wanted.insert(wanted.end(), rest.begin(), rest.end());
  const auto got = captured.run(steps);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GT(captured.graphs().replayed(), 3);
  std::int64_t skipped = 0;
  bool grew = false;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
    ASSERT_EQ(got[i].scaling->scale, wanted[i].scaling->scale) << "step " << i + 1;
    ASSERT_EQ(got[i].scaling->skipped, !std::isfinite(got[i].grad_norm));
    skipped += got[i].scaling->skipped ? 1 : 0;
    grew = grew || got[i].scaling->next_scale > got[i].scaling->scale;
    ASSERT_EQ(got[i].scaling->skipped_steps, skipped);
    if (i + 1 < got.size()) {
      ASSERT_EQ(got[i].scaling->next_scale, got[i + 1].scaling->scale);
    }
  }
  EXPECT_GT(skipped, 3);
  EXPECT_TRUE(grew);
  EXPECT_EQ(captured.hash(), eager.hash());
  EXPECT_EQ(captured.scaler_state(), eager.scaler_state());
  EXPECT_EQ(captured.optimizer().steps(), steps - skipped);
  EXPECT_NE(captured.hash(), before);
}

// Also where a graph reads bf16 copies of them; and copies that nothing in the graph reads are made again.
TEST_P(CudaStep, WeightsThatAreLoadedAreThoseOfTheNextStep) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (GetParam() == "cnn" && dtype != DType::kBF16) continue;  // slow in software
    Setting setting = {.cuda = true, .model = GetParam(), .activations = dtype, .capture = false};
    Training eager(setting);
    setting.capture = true;
    Training captured(setting);
    const auto first = eager.state();
    eager.run(8);
    captured.run(8);
    ASSERT_GT(captured.graphs().replayed(), 0);
    nn::load_state(eager.module(), first, "the beginning");
    nn::load_state(captured.module(), first, "the beginning");
    const auto wanted = eager.run(4), got = captured.run(4);
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i].totals.loss, wanted[i].totals.loss) << name_of(dtype) << ", step " << i + 1;
    EXPECT_EQ(captured.hash(), eager.hash());
    EXPECT_EQ(captured.copies(), eager.copies()) << name_of(dtype);
    captured.run(2);
    eager.run(2);
    EXPECT_EQ(captured.copies(), eager.copies()) << name_of(dtype);
  }
}

TEST_P(CudaStep, ALossThatIsNotFiniteMovesNothing) {
  Setting setting = {.cuda = true, .model = GetParam(), .lr = 1e30};
  Training training(setting);
  const auto outcomes = training.run(8);
  const auto bad = std::ranges::find_if(outcomes, [](const auto& o) { return !std::isfinite(o.totals.loss); });
  ASSERT_NE(bad, outcomes.end());
  const std::string hash = training.hash();
  training.run(2);
  EXPECT_EQ(training.hash(), hash);
}

// All steps have one size.
TEST_P(CudaStep, NothingIsAllocatedOrBuiltInTheSteadyState) {
  for (const bool capture : {false, true})
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      if (GetParam() == "cnn" && !(capture && dtype == DType::kBF16)) continue;  // slow in software
      Setting setting = {
          .cuda = true, .model = GetParam(), .activations = dtype, .capture = capture, .tail = sampler::Tail::kDrop};
      if (dtype == DType::kF16) setting.scaling.emplace();
      Training training(setting);
      training.run(10);
      const auto allocations = training.backend().allocator().stats().system_allocations;
      const auto primitives = training.backend().primitives_created();
      training.run(6);
      EXPECT_EQ(training.backend().allocator().stats().system_allocations, allocations);
      EXPECT_EQ(training.backend().primitives_created(), primitives);
    }
}

TEST_P(CudaStep, WeightsMoveBetweenDevices) {
  Setting setting = {.cuda = true, .model = GetParam()};
  Training cuda(setting);
  cuda.run(3);
  setting.cuda = false;
  Training cpu(setting);
  EXPECT_NE(cpu.hash(), cuda.hash());
  nn::load_state(cpu.module(), cuda.state(), "the other device");
  EXPECT_EQ(cpu.hash(), cuda.hash());
  cpu.run(1);
  nn::load_state(cuda.module(), cpu.state(), "the other device");
  EXPECT_EQ(cpu.hash(), cuda.hash());
}

// A file of synthetic tokens in which the next one follows from the last, as a rule.
class CudaTextStep : public ::testing::TestWithParam<std::string> {
 protected:
  CudaTextStep() {
    std::ofstream file(directory_.path("tokens.bin"), std::ios::binary);
    SplitMix64 random(3);
    for (unsigned i = 0, token = 0; i < 1500; ++i) {
      token = random.below(5) == 0 ? random.below(kVocabulary) : (token * 5 + 1) % kVocabulary;
      file.put(static_cast<char>(token)).put('\0');
    }
  }

  Setting setting() const {
    return {.model = GetParam(),
            .global_batch = 6,
            .tail = sampler::Tail::kDrop,
            .lr = 3e-3,
            .data = "tokens:" + directory_.path("tokens.bin"),
            .dropout = 0.1};
  }

 private:
  testing::TemporaryDirectory directory_;
};

// Dropout included: the same elements are kept on both.
TEST_P(CudaTextStep, FollowsTheCpu) {
  Setting wanted_of = setting();
  wanted_of.clip_norm = 1.0;
  Setting got_of = wanted_of;
  got_of.cuda = true;
  Training cpu(wanted_of), cuda(got_of);
  ASSERT_EQ(cpu.hash(), cuda.hash());
  const auto wanted = cpu.run(8), got = cuda.run(8);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].totals.count, wanted[i].totals.count);
    EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-4 * wanted[i].totals.loss) << "step " << i + 1;
    EXPECT_NEAR(got[i].grad_norm, wanted[i].grad_norm, 1e-3 * wanted[i].grad_norm) << "step " << i + 1;
  }
  EXPECT_LT(got.back().totals.loss, got.front().totals.loss);
  expect_close(cpu, cuda, 2e-3f);
  EXPECT_NEAR(cuda.evaluate().loss, cpu.evaluate().loss, 1e-3 * cpu.evaluate().loss);
}

// Steps that are captured drop other elements each time, too.
TEST_P(CudaTextStep, StepGraphsMatchEagerSteps) {
  Setting eager_of = setting();
  eager_of.cuda = true;
  eager_of.capture = false;
  Setting captured_of = eager_of;
  captured_of.capture = true;
  Training eager(eager_of), captured(captured_of);
  const auto wanted = eager.run(12), got = captured.run(12);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GE(captured.graphs().replayed(), 5);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].totals.loss, wanted[i].totals.loss) << "step " << i + 1;
  EXPECT_EQ(captured.hash(), eager.hash());
}

// Each row begins with what the row before has left, on both, whether steps are captured or not, and from zeros in the
// second epoch.
TEST_P(CudaTextStep, CarriesItsStateAsTheCpuDoes) {
  if (has_blocks(GetParam())) GTEST_SKIP() << "it carries none";
  Setting cpu_of = setting();
  cpu_of.stateful = true;
  Setting eager_of = cpu_of;
  eager_of.cuda = true;
  eager_of.capture = false;
  Setting captured_of = eager_of;
  captured_of.capture = true;
  Training cpu(cpu_of), eager(eager_of), captured(captured_of);
  constexpr int kSteps = 26;  // of which an epoch has 22
  const auto wanted = cpu.run(kSteps), got = eager.run(kSteps), replayed = captured.run(kSteps);
  EXPECT_EQ(wanted.back().plan.epoch, 1u);
  EXPECT_EQ(captured.graphs().refusal(), "");
  EXPECT_GE(captured.graphs().replayed(), 5);
  ASSERT_EQ(replayed.size(), got.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(replayed[i].totals.loss, got[i].totals.loss) << "step " << i + 1;
    EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 1e-3 * wanted[i].totals.loss) << "step " << i + 1;
  }
  EXPECT_EQ(captured.hash(), eager.hash());
  const auto left = eager.carried(), right = captured.carried(), host = cpu.carried();
  ASSERT_EQ(left.size(), host.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].bytes, right[i].bytes) << left[i].name;
    EXPECT_LE(largest_difference(left[i], host[i]), 1e-2f) << left[i].name;
  }
  Setting bf16_of = captured_of;
  bf16_of.activations = DType::kBF16;
  Training bf16(bf16_of);
  const auto rounded = bf16.run(8);
  for (std::size_t i = 0; i < rounded.size(); ++i)
    EXPECT_NEAR(rounded[i].totals.loss, wanted[i].totals.loss, 3e-2 * wanted[i].totals.loss) << "step " << i + 1;
}

TEST_P(CudaTextStep, LearnsInBf16AsInF32) {
  Setting f32_of = setting();
  f32_of.cuda = true;
  Setting bf16_of = f32_of;
  bf16_of.activations = DType::kBF16;
  Training f32(f32_of), bf16(bf16_of);
  const auto wanted = f32.run(8), got = bf16.run(8);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, 3e-2 * wanted[i].totals.loss) << "step " << i + 1;
  EXPECT_LT(got.back().totals.loss, got.front().totals.loss);
  EXPECT_NE(bf16.hash(), f32.hash());
}

INSTANTIATE_TEST_SUITE_P(Models, CudaTextStep, ::testing::Values("gpt", "llama", "lstm", "gru"),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Models, CudaStep, ::testing::Values("linear", "mlp", "cnn"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace lockstep::trainer
