// The moving average of parameters against a plain loop in f64.
#include "lockstep/nn/optim/moving_average.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class MovingAverages : public ::testing::Test {
 protected:
  MovingAverages() {
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{7}, std::int64_t{40001}}) {
      owned_.push_back(std::make_unique<Parameter>(*backend_, Shape{count}));
      named_.push_back({"p" + std::to_string(count), owned_.back().get()});
    }
    move(0);
  }
  void move(int step) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      const Tensor& value = owned_[i]->value();
      backend_->pointwise().copy(random_tensor(*backend_, value.shape(), 10u * static_cast<unsigned>(step) + i), value);
      owned_[i]->changed();
    }
  }
  std::vector<std::vector<float>> parameters() {
    std::vector<std::vector<float>> all;
    for (const auto& parameter : owned_) all.push_back(values_of(parameter->value()));
    return all;
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend(2);
  std::vector<std::unique_ptr<Parameter>> owned_;
  std::vector<NamedParameter> named_;
};

TEST_F(MovingAverages, FollowTheFormula) {
  constexpr double kDecay = 0.9;
  MovingAverage average(named_, kDecay);
  std::vector<std::vector<double>> expected;
  for (const auto& values : parameters()) expected.emplace_back(values.begin(), values.end());
  for (int step = 1; step <= 10; ++step) {
    move(step);
    average.update();
    const auto values = parameters();
    for (std::size_t k = 0; k < expected.size(); ++k) {
      const auto got = values_of(average.values()[k].value);
      for (std::size_t i = 0; i < expected[k].size(); ++i) {
        expected[k][i] = kDecay * expected[k][i] + (1 - kDecay) * static_cast<double>(values[k][i]);
        ASSERT_NEAR(static_cast<double>(got[i]), expected[k][i], 2e-7 * step) << k << " " << i << " step " << step;
      }
    }
  }
}

TEST_F(MovingAverages, ReplaceParametersTemporarily) {
  MovingAverage average(named_, 0.5);
  move(1);
  average.update();
  const auto before = parameters();
  const auto version = owned_[1]->version();
  {
    const auto in_place = average.in_place();
    EXPECT_NE(parameters(), before);
    EXPECT_NE(owned_[1]->version(), version);
    for (std::size_t i = 0; i < owned_.size(); ++i) EXPECT_EQ(values_of(average.values()[i].value), before[i]);
  }
  EXPECT_EQ(parameters(), before);
}

TEST_F(MovingAverages, MistakesAreNamed) {
  for (const double decay : {0.0, 1.0, -0.5, 1.5, std::nan("")}) EXPECT_THROW(MovingAverage(named_, decay), UsageError);
  EXPECT_NO_THROW(MovingAverage({}, 0.5).update());
}

}  // namespace
}  // namespace lockstep::nn
