// Loss scaling on the CPU: gradients of scaled losses, steps that are skipped, and how the scale moves.
#include "lockstep/nn/optim/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// torch.amp.GradScaler's update(), in plain words.
struct PlainScaler {
  double scale, growth, backoff;
  std::int64_t interval, good = 0, skipped = 0;

  void update(bool finite) {
    if (!finite) {
      scale *= backoff;
      good = 0;
      ++skipped;
    } else if (++good == interval) {
      scale *= growth;
      good = 0;
    }
  }
};

// Parameters of odd sizes, and gradients that are given instead of computed.
class Parameters {
 public:
  explicit Parameters(Backend& backend) : backend_(backend) {
    for (const std::int64_t count : {1, 7, 5000}) {
      owned_.push_back(std::make_unique<Parameter>(backend, Shape{count}));
      named_.push_back({"p" + std::to_string(count), owned_.back().get()});
      backend.pointwise().copy(random_tensor(backend, {count}, static_cast<unsigned>(count)), owned_.back()->value());
    }
  }

  /// Gradients of step `step`, times `scale`; in the last element of parameter `where` `bad`, if that is something.
  void give_gradients(unsigned step, float scale, std::optional<float> bad = {}, std::size_t where = 2) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      const Tensor gradient = random_tensor(backend_, owned_[i]->value().shape(), 100 * step + i);
      for (float& g : gradient.span<float>()) g *= scale;
      if (bad && i == where) gradient.f32()[gradient.count() - 1] = *bad;
      owned_[i]->bind_gradient(gradient);
      owned_[i]->mark_grad_valid();
    }
  }
  Parameter& operator[](std::size_t i) { return *owned_[i]; }
  const std::vector<NamedParameter>& named() const { return named_; }
  std::vector<std::vector<float>> values() const {
    std::vector<std::vector<float>> all;
    for (const auto& parameter : owned_) all.push_back(values_of(parameter->value()));
    return all;
  }

 private:
  Backend& backend_;
  std::vector<std::unique_ptr<Parameter>> owned_;
  std::vector<NamedParameter> named_;
};

std::vector<std::vector<float>> moments_of(const Optimizer& optimizer) {
  std::vector<std::vector<float>> all;
  for (const auto& moment : optimizer.moments()) all.push_back(values_of(moment.value));
  return all;
}

class GradScalers : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend = make_cpu_backend(2);
};

TEST_F(GradScalers, ScaleMatchesPyTorch) {
  for (const std::int64_t interval : {1, 2, 5}) {
    GradScaler scaler(*backend, {.initial_scale = 1024, .growth_interval = interval});
    PlainScaler reference{.scale = 1024, .growth = 2, .backoff = 0.5, .interval = interval};
    Parameters parameters(*backend);
    const auto optimizer = make_sgd(parameters.named(), {});
    optimizer->set_scaler(&scaler);
    for (unsigned step = 1; step <= 40; ++step) {
      const bool bad = step % 7 == 0 || step % 11 == 3;
      parameters.give_gradients(step, *scaler.scale().f32(),
                                bad ? std::optional(step % 2 == 0 ? kInf : kNan) : std::nullopt, step % 3);
      optimizer->step(0.01);
      scaler.update();
      reference.update(!bad);
      const GradScaler::State state = scaler.state();
      ASSERT_EQ(static_cast<double>(state.scale), reference.scale) << "interval " << interval << " step " << step;
      ASSERT_EQ(state.good_steps, reference.good);
      ASSERT_EQ(state.skipped_steps, reference.skipped);
      ASSERT_EQ(optimizer->steps(), step - reference.skipped);
    }
  }
}

// A scale is a power of two, which no rounding sees: parameters and moments have the bits of a training that never had
// the steps that are skipped, bias corrections included.
TEST_F(GradScalers, SkippedStepsLeaveNoTrace) {
  for (const std::string& name : optimizer_names()) {
    SCOPED_TRACE(name);
    Parameters scaled(*backend), plain(*backend);
    const double decay = 0.01;
    const std::vector<ParameterGroup> groups = {{.patterns = {"p7"}, .lr_factor = 0.5, .weight_decay = 0.0}};
    const auto with = make_optimizer(name, scaled.named(), {}, decay, groups);
    const auto without = make_optimizer(name, plain.named(), {}, decay, groups);
    GradScaler scaler(*backend, {.growth_interval = 4});
    with->set_scaler(&scaler);
    std::int64_t good = 0;
    for (unsigned step = 1; step <= 20; ++step) {
      const float scale = *scaler.scale().f32();
      const bool bad = step <= 2 || step % 6 == 0;
      scaled.give_gradients(step, scale, bad ? std::optional(kInf) : std::nullopt, step % 3);
      const auto before = scaled.values();
      with->step(0.01);
      scaler.update();
      if (bad) {
        EXPECT_EQ(scaled.values(), before);
        continue;
      }
      ++good;
      plain.give_gradients(step, 1.0f);
      without->step(0.01);
      ASSERT_EQ(scaled.values(), plain.values()) << "step " << step;
      ASSERT_EQ(moments_of(*with), moments_of(*without)) << "step " << step;
    }
    EXPECT_EQ(with->steps(), good);
    EXPECT_EQ(scaler.state().skipped_steps, 20 - good);
  }
}

TEST_F(GradScalers, ClippingIsByTheNormOfGradientsThatAreNotScaled) {
  Parameters scaled(*backend), plain(*backend);
  const auto with = make_sgd(scaled.named(), {.momentum = 0.9}), without = make_sgd(plain.named(), {.momentum = 0.9});
  GradScaler scaler(*backend);
  with->set_scaler(&scaler);
  for (unsigned step = 1; step <= 5; ++step) {
    const double clip_norm = step == 3 ? 1e6 : 2.0;  // more than there is, and less
    scaled.give_gradients(step, 65536.0f);
    plain.give_gradients(step, 1.0f);
    with->step({.lr = 0.1, .clip_norm = clip_norm});
    without->step({.lr = 0.1, .clip_norm = clip_norm});
    scaler.update();
    const auto got = scaled.values(), expected = plain.values();
    for (std::size_t k = 0; k < got.size(); ++k)
      for (std::size_t i = 0; i < got[k].size(); ++i) ASSERT_NEAR(got[k][i], expected[k][i], 1e-6f);
  }
}

// The order of a loop over buckets: squares, the decision, updates.
TEST_F(GradScalers, StepsMayComeInParts) {
  Parameters scaled(*backend), plain(*backend);
  const auto with = make_adamw(scaled.named(), {}), without = make_adamw(plain.named(), {});
  GradScaler scaler(*backend);
  with->set_scaler(&scaler);
  const Tensor squares = backend->empty({1}, DType::kF64), loss = backend->zeros({1});
  for (unsigned step = 1; step <= 4; ++step) {
    scaled.give_gradients(step, *scaler.scale().f32(), step == 2 ? std::optional(kNan) : std::nullopt);
    with->zero_grad();
    with->begin_step(0.01);
    with->add_squares(std::vector<std::size_t>{2});
    with->add_squares(std::vector<std::size_t>{0, 1});
    EXPECT_REFUSED("before it is known", with->update(std::vector<std::size_t>{0}));
    EXPECT_REFUSED("the sum of its squares", with->compute_update_scale(loss, {}, 0));
    with->sum_squares(squares);
    with->compute_update_scale(loss, squares, 0);
    with->update(std::vector<std::size_t>{2});
    with->update(std::vector<std::size_t>{0, 1});
    scaler.update();
    if (step == 2) continue;
    plain.give_gradients(step, 1.0f);
    without->step(0.01);
    ASSERT_EQ(scaled.values(), plain.values());
  }
  EXPECT_EQ(with->steps(), 3);
}

// A loss that is not finite while the gradients are is no overflow of theirs.
TEST_F(GradScalers, ALossThatIsNotFiniteMovesNothingAndIsNoSkippedStep) {
  Parameters parameters(*backend);
  const auto optimizer = make_adamw(parameters.named(), {});
  GradScaler scaler(*backend);
  optimizer->set_scaler(&scaler);
  const Tensor squares = backend->empty({1}, DType::kF64), loss = tensor_of(*backend, {1}, {kNan});
  parameters.give_gradients(1, 65536.0f);
  const auto before = parameters.values();
  optimizer->begin_step(0.01);
  optimizer->add_squares(std::vector<std::size_t>{0, 1, 2});
  optimizer->sum_squares(squares);
  optimizer->compute_update_scale(loss, squares, 0);
  optimizer->update(std::vector<std::size_t>{0, 1, 2});
  scaler.update();
  EXPECT_EQ(parameters.values(), before);
  EXPECT_EQ(optimizer->steps(), 0);
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 65536, .good_steps = 1}));
}

// PyTorch counts the steps of a parameter alone: neither skipped ones, nor those in which it had no gradient.
TEST_F(GradScalers, ParametersWithoutGradientsMissTheirStepsAlone) {
  Parameters scaled(*backend), plain(*backend);
  const auto with = make_adamw(scaled.named(), {}), without = make_adamw(plain.named(), {});
  GradScaler scaler(*backend);
  with->set_scaler(&scaler);
  for (unsigned step = 1; step <= 12; ++step) {
    const bool bad = step % 4 == 1, missing = step % 3 != 0;
    scaled.give_gradients(step, *scaler.scale().f32(), bad ? std::optional(kInf) : std::nullopt);
    if (missing) scaled[1].clear_grad();
    with->step(0.01);
    scaler.update();
    if (bad) continue;
    plain.give_gradients(step, 1.0f);
    if (missing) plain[1].clear_grad();
    without->step(0.01);
    ASSERT_EQ(scaled.values(), plain.values()) << "step " << step;
  }
}

TEST_F(GradScalers, SeveralOptimizersSkipTheirOwnSteps) {
  Parameters first(*backend), second(*backend);
  const auto one = make_sgd(first.named(), {}), other = make_sgd(second.named(), {});
  GradScaler scaler(*backend);
  one->set_scaler(&scaler);
  other->set_scaler(&scaler);
  first.give_gradients(1, 65536.0f, kInf);
  second.give_gradients(1, 65536.0f);
  const auto of_first = first.values(), of_second = second.values();
  one->step(0.1);
  other->step(0.1);
  scaler.update();
  EXPECT_EQ(first.values(), of_first);
  EXPECT_NE(second.values(), of_second);
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 32768, .skipped_steps = 1}));
}

TEST_F(GradScalers, AConstantScaleSkipsAndStays) {
  Parameters parameters(*backend);
  const auto optimizer = make_sgd(parameters.named(), {});
  GradScaler scaler(*backend, {.initial_scale = 100, .growth_interval = 1, .dynamic = false});
  optimizer->set_scaler(&scaler);
  const auto before = parameters.values();
  parameters.give_gradients(1, 100.0f, kInf);
  optimizer->step(0.1);
  scaler.update();
  EXPECT_EQ(parameters.values(), before);
  parameters.give_gradients(2, 100.0f);
  optimizer->step(0.1);
  scaler.update();
  EXPECT_NE(parameters.values(), before);
  EXPECT_EQ(scaler.state().scale, 100.0f);
  EXPECT_EQ(scaler.state().skipped_steps, 1);
}

// Neither infinity nor 0 is a scale.
TEST_F(GradScalers, TheScaleStaysANumber) {
  Parameters parameters(*backend);
  const auto optimizer = make_sgd(parameters.named(), {});
  GradScaler scaler(*backend, {.initial_scale = 0x1p126, .growth_interval = 1});
  optimizer->set_scaler(&scaler);
  for (unsigned step = 1; step <= 4; ++step) {
    parameters.give_gradients(step, 1.0f);
    optimizer->step(0.0);
    scaler.update();
  }
  EXPECT_EQ(scaler.state().scale, 0x1p127f);
  for (unsigned step = 1; step <= 400; ++step) {
    parameters.give_gradients(step, 1.0f, kNan);
    optimizer->step(0.0);
    scaler.update();
  }
  EXPECT_GT(scaler.state().scale, 0.0f);
  EXPECT_EQ(scaler.state().skipped_steps, 400);
}

// The whole way: losses multiply their gradients, sums stay as they are.
TEST_F(GradScalers, LossesScaleTheirGradientsAndNotTheirSums) {
  GradScaler scaler(*backend, {.initial_scale = 4096});
  const Tensor x = random_tensor(*backend, {6, 5}, 1), target = random_tensor(*backend, {6, 5}, 2);
  const Tensor labels = backend->empty({6}, DType::kI32);
  for (int i = 0; i < 6; ++i) labels.data<std::int32_t>()[i] = i % 5;
  const std::vector<std::function<Loss(Tape&, Var)>> losses = {
      [&](Tape& tape, Var in) { return cross_entropy(tape, in, labels, 0.25f); },
      [&](Tape& tape, Var in) { return cross_entropy(tape, in, labels, 0.25f, 0.5f); },
      [&](Tape& tape, Var in) { return squared_error(tape, in, target, 0.25f); },
      [&](Tape& tape, Var in) { return sum(tape, square(tape, in), 0.25f); }};
  for (const auto& loss_of : losses) {
    std::vector<std::vector<float>> gradients, totals;
    for (const bool scaled : {false, true}) {
      Tape tape(*backend);
      if (scaled) tape.set_loss_scale(scaler.scale());
      const Var in = tape.differentiable_input(x);
      const Loss loss = loss_of(tape, in);
      totals.push_back(values_of(loss.totals()));
      tape.backward(loss.value);
      gradients.push_back(values_of(tape.grad(in)));
    }
    EXPECT_EQ(totals[0][0], totals[1][0]);
    for (std::size_t i = 0; i < gradients[0].size(); ++i) ASSERT_EQ(gradients[1][i], 4096.0f * gradients[0][i]);
  }
}

TEST_F(GradScalers, ARunResumesFromItsState) {
  const auto run = [&](Parameters& parameters, Optimizer& optimizer, GradScaler& scaler, unsigned from, unsigned to) {
    for (unsigned step = from; step <= to; ++step) {
      parameters.give_gradients(step, *scaler.scale().f32(), step % 4 == 2 ? std::optional(kInf) : std::nullopt);
      optimizer.step(0.01);
      scaler.update();
    }
  };
  const GradScaler::Options options = {.growth_interval = 3};
  Parameters whole(*backend), parts(*backend);
  GradScaler of_whole(*backend, options), first(*backend, options), second(*backend, options);
  const auto optimizer = make_adamw(whole.named(), {}), before = make_adamw(parts.named(), {});
  const auto after = make_adamw(parts.named(), {});
  optimizer->set_scaler(&of_whole);
  before->set_scaler(&first);
  run(whole, *optimizer, of_whole, 1, 15);
  run(parts, *before, first, 1, 7);
  second.set_state(first.state());
  after->set_scaler(&second);
  after->set_steps(before->steps());
  for (std::size_t i = 0; i < after->moments().size(); ++i)
    backend->pointwise().copy(before->moments()[i].value, after->moments()[i].value);
  run(parts, *after, second, 8, 15);
  EXPECT_EQ(parts.values(), whole.values());
  EXPECT_EQ(second.state(), of_whole.state());
  EXPECT_EQ(after->steps(), optimizer->steps());
}

// An optimizer may get one later, and continue without.
TEST_F(GradScalers, MayComeAndGo) {
  Parameters scaled(*backend), plain(*backend);
  const auto with = make_adamw(scaled.named(), {}), without = make_adamw(plain.named(), {});
  GradScaler scaler(*backend);
  for (unsigned step = 1; step <= 9; ++step) {
    if (step == 4) with->set_scaler(&scaler);
    if (step == 7) with->set_scaler(nullptr);
    const bool bad = step == 5;
    scaled.give_gradients(step, with->scaler() != nullptr ? *scaler.scale().f32() : 1.0f,
                          bad ? std::optional(kInf) : std::nullopt);
    with->step(0.01);
    if (with->scaler() != nullptr) scaler.update();
    if (bad) continue;
    plain.give_gradients(step, 1.0f);
    without->step(0.01);
    ASSERT_EQ(scaled.values(), plain.values()) << "step " << step;
  }
  EXPECT_EQ(with->steps(), 8);
}

TEST_F(GradScalers, MovingAveragesMaySkipTheSameSteps) {
  Parameters parameters(*backend);
  const auto optimizer = make_sgd(parameters.named(), {});
  GradScaler scaler(*backend);
  optimizer->set_scaler(&scaler);
  MovingAverage average(parameters.named(), 0.5);
  for (const bool bad : {false, true}) {
    parameters.give_gradients(1, 65536.0f, bad ? std::optional(kInf) : std::nullopt);
    const auto before = values_of(average.values()[2].value);
    optimizer->step(0.1);
    average.update(optimizer->control());
    EXPECT_EQ(values_of(average.values()[2].value) == before, bad);
    scaler.update();
  }
}

TEST_F(GradScalers, InvalidScalesAreRefused) {
  for (const double scale : {0.0, -1.0, 1e39, static_cast<double>(kNan), 1e-40})
    EXPECT_REFUSED("losses scaled by", GradScaler(*backend, {.initial_scale = scale}));
  EXPECT_REFUSED("grows by 1", GradScaler(*backend, {.growth_factor = 1.0}));
  EXPECT_REFUSED("falls by 1", GradScaler(*backend, {.backoff_factor = 1.0}));
  for (const std::int64_t interval : {std::int64_t{0}, std::int64_t{1} << 25})
    EXPECT_REFUSED("grows after", GradScaler(*backend, {.growth_interval = interval}));
  GradScaler scaler(*backend);
  EXPECT_REFUSED("losses scaled by 0", scaler.set_state({.scale = 0}));
  EXPECT_REFUSED("-1 steps", scaler.set_state({.scale = 1, .good_steps = -1}));
  EXPECT_EQ(scaler.state(), GradScaler::State{.scale = 65536});
  const auto other = make_cpu_backend(1);
  Parameters parameters(*other);
  const auto optimizer = make_sgd(parameters.named(), {});
  EXPECT_REFUSED("of another backend", optimizer->set_scaler(&scaler));
  Tape tape(*backend);
  EXPECT_REFUSED("losses scaled by f32 [2]", tape.set_loss_scale(backend->empty({2})));
  EXPECT_REFUSED("i32", tape.set_loss_scale(backend->empty({1}, DType::kI32)));
}

}  // namespace
}  // namespace lockstep::nn
