// The same for other targets: probabilities, labels that are ignored, numbers, two classes.
#include "tests/trainer/device_training.h"

namespace lockstep::trainer {
namespace {

void expect_losses(const std::vector<TrainingStep::Outcome>& got, const std::vector<TrainingStep::Outcome>& wanted,
                   double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i].totals.loss, wanted[i].totals.loss, tolerance * wanted[i].totals.loss) << "step " << i + 1;
}

// Targets that are probabilities of classes.
TEST(CudaTargets, MixedSamplesFollowTheCpuAlsoFromGraphs) {
  for (const bool weighted : {false, true}) {
    Setting setting = {.lr = 1e-3, .data_settings = {{"mixup", 0.4}, {"cutmix", 1.0}}};
    setting.loss_settings = {{"label-smoothing", 0.1}};
    if (weighted) setting.loss_settings.set("class-weights", std::vector<double>{1, 2, 1, 0, 1, 1, 3, 1, 1, 0.5});
    Training cpu(setting);
    setting.cuda = true;
    Training captured(setting);
    setting.capture = false;
    Training eager(setting);
    const auto wanted = cpu.run(14), got = eager.run(14), replayed = captured.run(14);
    expect_losses(got, wanted, 1e-4);
    expect_losses(replayed, got, 0);
    EXPECT_EQ(captured.graphs().refusal(), "");
    EXPECT_GT(captured.graphs().replayed(), 5);
    EXPECT_EQ(captured.hash(), eager.hash());
    expect_close(cpu, eager, 2e-3f);
    EXPECT_NEAR(eager.evaluate().loss, cpu.evaluate().loss, 1e-3 * cpu.evaluate().loss);
    setting.activations = DType::kBF16;
    Training bf16(setting);
    expect_losses(bf16.run(14), wanted, 3e-2);
  }
}

TEST(CudaTargets, IgnoredLabelsFollowTheCpu) {
  Setting setting = {.lr = 1e-3, .ignored = 3};
  setting.loss_settings = {{"ignore-index", std::vector<std::int64_t>{3}}};
  Training cpu(setting);
  setting.cuda = true;
  Training cuda(setting);
  const auto wanted = cpu.run(12), got = cuda.run(12);
  expect_losses(got, wanted, 1e-4);
  EXPECT_EQ(cuda.graphs().replayed(), 0);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].targets, wanted[i].targets);
    EXPECT_LE(got[i].targets, got[i].totals.count);
  }
  expect_close(cpu, cuda, 2e-3f);
  const EvalReport here = cpu.evaluate(), there = cuda.evaluate();
  EXPECT_NEAR(there.loss, here.loss, 1e-3 * here.loss);
  EXPECT_NEAR(there.accuracy, here.accuracy, 0.02);
}

/// Numbers and categories, a number to predict; or two classes.
class CudaTableStep : public ::testing::TestWithParam<bool> {
 protected:
  Setting setting() const {
    std::string text = "x,kind,place,target\n";
    for (int i = 0; i < 200; ++i)
      text += fmt::format("{},k{},p{},{}\n", i * 7 % 13, i % 3, i * 11 % 5,
                          GetParam() ? i * 7 % 13 + 5 * (i % 3) : (i * 7 % 13 + i % 3) % 2);
    return {.model = "tabular",
            .data = "table:" + directory_.write("t.csv", text),
            .dropout = 0.2,
            .weighted = !GetParam()};
  }

  testing::TemporaryDirectory directory_;
};

TEST_P(CudaTableStep, FollowsTheCpu) {
  Setting wanted = setting();
  wanted.lr = 1e-3;
  Training cpu(wanted);
  wanted.cuda = true;
  Training cuda(wanted);
  ASSERT_EQ(cpu.hash(), cuda.hash());
  const auto expected = cpu.run(12), got = cuda.run(12);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i].totals.loss, expected[i].totals.loss, 1e-4 * expected[i].totals.loss) << "step " << i + 1;
  expect_close(cpu, cuda, 2e-3f);
  const EvalReport here = cpu.evaluate(), there = cuda.evaluate();
  EXPECT_EQ(here.errors.has_value(), GetParam());
  EXPECT_EQ(here.auc.has_value(), !GetParam());
  if (here.errors) {
    EXPECT_NEAR(there.errors->r2.value(), here.errors->r2.value(), 1e-3);
  } else {
    EXPECT_NEAR(there.auc.value(), here.auc.value(), 2e-2);
  }
}

TEST_P(CudaTableStep, StepGraphsMatchEagerSteps) {
  Setting eager = setting(), graphs = setting();
  eager.cuda = graphs.cuda = true;
  eager.capture = false;
  Training without(eager), with(graphs);
  without.run(20);
  with.run(20);
  EXPECT_EQ(with.graphs().refusal(), "");
  EXPECT_GT(with.graphs().replayed(), 5);
  EXPECT_EQ(with.hash(), without.hash());
}

TEST_P(CudaTableStep, LearnsInBf16AsInF32) {
  Setting half = setting();
  half.cuda = true;
  half.activations = DType::kBF16;
  Training f32([&] {
    Setting same = half;
    same.activations = DType::kF32;
    return same;
  }());
  Training bf16(half);
  const auto wanted = f32.run(30), got = bf16.run(30);
  EXPECT_NEAR(got.back().totals.loss, wanted.back().totals.loss, 0.05 * wanted.front().totals.loss);
}

INSTANTIATE_TEST_SUITE_P(Targets, CudaTableStep, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Numbers" : "Classes"; });

}  // namespace
}  // namespace lockstep::trainer
