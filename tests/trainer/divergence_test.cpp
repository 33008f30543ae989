// What ends a run whose numbers are not finite, and what does not.
#include "trainer/divergence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/process_group.h"
#include "nn/io/safetensors_writer.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"
#include "trainer/carried_state.h"

namespace lockstep::trainer {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

StepReport step_of(double loss, double norm) { return {.step = 7, .epoch = 2, .loss = loss, .grad_norm = norm}; }
StepReport scaled(double loss, double scale, double next, bool skipped) {
  StepReport report = step_of(loss, skipped ? kInf : 1.0);
  report.scaling = LossScaling{.scale = scale, .next_scale = next, .skipped = skipped};
  return report;
}

std::string refusal_of(DivergenceWatch& watch, const StepReport& report) {
  try {
    watch.follow(report);
  } catch (const DivergedError& error) {
    EXPECT_EQ(testing::group().rank(), 0);
    return error.what();
  } catch (const PeerError& error) {
    EXPECT_NE(testing::group().rank(), 0);
    return error.what();
  }
  return "";
}

TEST(Divergence, IsALossThatIsNotFinite) {
  DivergenceWatch watch(testing::group(), /*clips=*/false, /*dynamic=*/true);
  EXPECT_EQ(refusal_of(watch, step_of(1.0, kNan)), "");
  EXPECT_EQ(refusal_of(watch, step_of(kNan, 1.0)), "the loss is NaN at step 7 (epoch 2)");
  EXPECT_EQ(refusal_of(watch, step_of(kInf, 1.0)), "the loss is infinite at step 7 (epoch 2)");
}

TEST(Divergence, IsANormThatIsNotFiniteWhereItClips) {
  DivergenceWatch watch(testing::group(), /*clips=*/true, /*dynamic=*/true);
  EXPECT_EQ(refusal_of(watch, step_of(1.0, 1.0)), "");
  EXPECT_EQ(refusal_of(watch, step_of(1.0, kNan)), "the gradients' norm is NaN at step 7 (epoch 2)");
}

// Neither its loss nor its norm says anything.
TEST(Divergence, IsNoStepThatWasSkipped) {
  for (const bool clips : {false, true}) {
    DivergenceWatch watch(testing::group(), clips, /*dynamic=*/true);
    for (const double loss : {1.0, kInf, kNan}) EXPECT_EQ(refusal_of(watch, scaled(loss, 65536, 32768, true)), "");
    EXPECT_EQ(refusal_of(watch, scaled(1.0, 1, 1, false)), "");
    EXPECT_EQ(refusal_of(watch, scaled(kNan, 1, 1, false)), "the loss is NaN at step 7 (epoch 2)");
  }
}

TEST(Divergence, IsAScaleThatFallsToNothing) {
  DivergenceWatch watch(testing::group(), false, /*dynamic=*/true);
  EXPECT_EQ(refusal_of(watch, scaled(1.0, 0x1p-13, 0x1p-14, true)), "");
  EXPECT_EQ(refusal_of(watch, scaled(1.0, 0x1p-14, 0x1p-15, true)),
            "the gradients are not finite at step 7 (epoch 2), even of losses scaled by 6.10352e-05");
}

TEST(Divergence, IsAConstantScaleThatSkipsStepAfterStep) {
  DivergenceWatch watch(testing::group(), false, /*dynamic=*/false);
  const auto skip = [&](int times) {
    for (int i = 0; i < times; ++i) EXPECT_EQ(refusal_of(watch, scaled(1.0, 512, 512, true)), "") << i;
  };
  skip(30);
  EXPECT_EQ(refusal_of(watch, scaled(1.0, 512, 512, false)), "");
  skip(30);
  EXPECT_EQ(refusal_of(watch, scaled(1.0, 512, 512, true)),
            "the gradients are not finite at step 7 (epoch 2), as in the 30 steps before it, of losses scaled by 512");
}

TEST(LossScaling, OfAConfiguration) {
  const auto backend = nn::make_cpu_backend(1);
  TrainConfig config;
  EXPECT_EQ(make_grad_scaler(config, *backend), nullptr);
  config.precision = Precision::kFp16;
  for (const char* text : {"", "dynamic"}) {
    config.loss_scale = text;
    const auto scaler = make_grad_scaler(config, *backend);
    EXPECT_TRUE(scaler->options().dynamic);
    EXPECT_EQ(scaler->state().scale, 65536.0f);
  }
  config.loss_scale = "100";
  const auto scaler = make_grad_scaler(config, *backend);
  EXPECT_FALSE(scaler->options().dynamic);
  EXPECT_EQ(scaler->state().scale, 100.0f);
  EXPECT_TRUE(scaler_tensors(nullptr).empty());
}

// As a checkpoint has it: rank 0 reads, all know.
class ScalerStates : public ::testing::Test {
 protected:
  ScalerStates() { resumed_.path = testing::group().all_gather_text(own_.path().string()).front(); }

  void write(std::vector<nn::HostTensor> tensors) {
    resumed_.manifest.files[checkpoint::kScalerFile] = {};
    if (testing::group().rank() != 0) return;
    std::vector<nn::TensorHeader> headers;
    for (const auto& tensor : tensors)
      headers.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes.size()});
    nn::SafetensorsWriter writer(resumed_.path + "/" + checkpoint::kScalerFile, headers);
    for (const auto& tensor : tensors) writer.add(tensor.bytes);
    writer.commit();
  }
  static nn::HostTensor tensor(const std::string& name, const std::vector<float>& values) {
    nn::HostTensor made{.name = name, .shape = {std::ssize(values)}, .bytes = {}};
    const auto bytes = std::as_bytes(std::span(values));
    made.bytes.assign(bytes.begin(), bytes.end());
    return made;
  }

  testing::TemporaryDirectory own_;
  checkpoint::Resumed resumed_;
  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
};

TEST_F(ScalerStates, GoThroughAFile) {
  const nn::GradScaler::State state = {.scale = 0.125f, .good_steps = 1999, .skipped_steps = 1 << 24};
  nn::GradScaler before(*backend_), after(*backend_), constant(*backend_, {.initial_scale = 7, .dynamic = false});
  before.set_state(state);
  write(scaler_tensors(&before));
  resume_scaler(resumed_, after, testing::group());
  EXPECT_EQ(after.state(), state);
  resume_scaler(resumed_, constant, testing::group());
  EXPECT_EQ(constant.state().scale, 7.0f) << "it is a setting";
  EXPECT_EQ(constant.state().skipped_steps, 1 << 24);
}

TEST_F(ScalerStates, FilesThatAreSomethingElseAreRefused) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<nn::HostTensor>> all = {
      {tensor("other", {1, 0, 0})},          {tensor("grad_scaler", {1, 0})},
      {tensor("grad_scaler", {0, 0, 0})},    {tensor("grad_scaler", {-2, 0, 0})},
      {tensor("grad_scaler", {nan, 0, 0})},  {tensor("grad_scaler", {inf, 0, 0})},
      {tensor("grad_scaler", {1, -1, 0})},   {tensor("grad_scaler", {1, 0, nan})},
      {tensor("grad_scaler", {1, 0, 1e9f})}, {tensor("grad_scaler", {1e-44f, 0, 0})}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    write(all[i]);
    nn::GradScaler scaler(*backend_);
    EXPECT_THROW(resume_scaler(resumed_, scaler, testing::group()), Error) << i;
    EXPECT_EQ(scaler.state().scale, 65536.0f) << i;
  }
}

}  // namespace
}  // namespace lockstep::trainer
