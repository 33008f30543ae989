// The registry of losses: each by its name, with its settings.
#include "lockstep/nn/losses/losses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using ::testing::Contains;

class Losses : public ::testing::Test {
 protected:
  // Sum, correct predictions and gradient, of 5 samples of 4 classes.
  std::vector<float> values_of_loss(const LossFunction& loss) {
    tape.reset();
    const Var x = tape.differentiable_input(random_tensor(*backend, {5, 4}, 1));
    const Tensor labels = backend->empty({5}, DType::kI32);
    for (std::int32_t i = 0; i < 5; ++i) labels.data<std::int32_t>()[i] = i % 4;
    const Loss made = loss(tape, x, labels, 0.5f);
    std::vector<float> values = {made.totals().f32()[0], made.totals().f32()[1]};
    tape.backward(made.value);
    const auto gradient = tape.grad(x).span<float>();
    values.insert(values.end(), gradient.begin(), gradient.end());
    return values;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Tape tape{*backend};
};

TEST_F(Losses, CrossEntropyIsTheUsualOne) {
  EXPECT_THAT(loss_names(), Contains(usual_loss().name));
  EXPECT_EQ(&loss_family("cross_entropy"), &usual_loss());
  const auto plain = [](Tape& on, Var x, const Tensor& to, float scale) { return cross_entropy(on, x, to, scale); };
  EXPECT_EQ(values_of_loss(make_loss()), values_of_loss(plain));
}

TEST_F(Losses, SettingsReachTheKernel) {
  const auto smoothed = [](Tape& on, Var x, const Tensor& to, float scale) {
    return cross_entropy(on, x, to, scale, 0.25f);
  };
  const auto made = values_of_loss(make_loss(usual_loss(), {{"label-smoothing", 0.25}}));
  EXPECT_EQ(made, values_of_loss(smoothed));
  EXPECT_NE(made, values_of_loss(make_loss()));
}

TEST_F(Losses, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(loss_family("cross-entropy"), UsageError);
  EXPECT_THROW(make_loss(usual_loss(), {{"gamma", 2.0}}), UsageError);
  for (const double smoothing : {-0.1, 1.0, std::nan("")})
    EXPECT_THROW(make_loss(usual_loss(), {{"label-smoothing", smoothing}}), UsageError) << smoothing;
}

}  // namespace
}  // namespace lockstep::nn
