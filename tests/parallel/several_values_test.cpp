// DataParallel of modules with several inputs and outputs, and with the loss in its replicas.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/splitmix.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/parallel/data_parallel.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

using lockstep::testing::Fusion;
using lockstep::testing::joint_loss;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

nn::Tensor random_rows(nn::Backend& backend, const nn::Shape& shape, std::uint64_t seed) {
  nn::Tensor made = backend.empty(shape);
  for (std::size_t i = 0; i < made.span<float>().size(); ++i)
    made.f32()[i] = static_cast<float>(SplitMix64::word(seed, i) % 2000) / 1000.0f - 1.0f;
  return made;
}

nn::Tensor labels_of_rows(nn::Backend& backend, std::int64_t count, std::int64_t classes) {
  nn::Tensor made = backend.empty({count}, DType::kI32);
  for (std::int64_t i = 0; i < count; ++i) made.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % classes);
  return made;
}

std::unique_ptr<nn::Module> fusion_on(nn::Backend& backend) {
  nn::Generator generator(1);
  nn::Context context{backend, generator};
  return nn::build<Fusion>(context);
}

std::vector<std::vector<float>> taken_gradients(const nn::Module& module) {
  std::vector<std::vector<float>> all;
  for (const auto& [name, parameter] : module.named_parameters()) {
    EXPECT_TRUE(parameter->has_gradient()) << name;
    const auto values = parameter->gradient().span<float>();
    all.emplace_back(values.begin(), values.end());
    parameter->clear_grad();
  }
  return all;
}

// f32 sums in another order.
void expect_same_values(const std::vector<float>& got, const std::vector<float>& wanted, float tolerance = 1e-5f) {
  ASSERT_EQ(got.size(), wanted.size());
  float largest = 0, difference = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(wanted[i]));
    difference = std::max(difference, std::abs(got[i] - wanted[i]));
  }
  EXPECT_LE(difference, tolerance * largest);
}

struct DeviceChoice {
  int devices;
  std::vector<int> ids;
  std::optional<int> output;
};

class SeveralDevices : public ::testing::TestWithParam<DeviceChoice> {
 protected:
  struct Pass {
    std::vector<std::vector<float>> gradients;
    std::vector<float> by_mask, classes, numbers;
    float loss = 0, correct = 0;
  };
  // Of a batch of `count`, whose mask wants a gradient.
  static Pass run(nn::Module& module, nn::Tape& tape, std::int64_t count, bool inside) {
    nn::Backend& backend = tape.backend();
    const nn::Var mask = tape.differentiable_input(random_rows(backend, {count, Fusion::kHidden}, 2));
    const nn::Vars inputs = {tape.input(random_rows(backend, {count, Fusion::kFeatures}, 1)), mask};
    const nn::Tensor labels = labels_of_rows(backend, count, Fusion::kClasses);
    const float scale = 1.0f / static_cast<float>(count);
    Pass pass;
    const auto copy = [](const nn::Tensor& from) {
      return std::vector<float>(from.span<float>().begin(), from.span<float>().end());
    };
    nn::Loss loss;
    if (inside) {
      loss = module.forward_loss(tape, inputs, labels, joint_loss, scale);
    } else {
      const nn::Vars outputs = module(tape, inputs);
      pass.classes = copy(outputs[0].value());
      pass.numbers = copy(outputs[1].value());
      loss = joint_loss(tape, outputs, labels, scale);
    }
    pass.loss = loss.totals().f32()[0];
    tape.backward(loss.value);
    pass.by_mask = copy(tape.grad(mask));
    pass.gradients = taken_gradients(module);
    tape.reset();
    return pass;
  }
};

TEST_P(SeveralDevices, ComputeWhatOneDoes) {
  const DeviceChoice& c = GetParam();
  Devices devices = Devices::cpu(c.devices);
  DataParallel model(fusion_on(devices[c.ids.front()]), devices, c.ids, c.output);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = fusion_on(*alone_backend);
  nn::Tape tape(model.output_backend()), alone_tape(*alone_backend);
  for (const std::int64_t count : {10, 1, 2, 7, 10}) {
    SCOPED_TRACE(count);
    const Pass wanted = run(*alone, alone_tape, count, false);
    const Pass outside = run(model, tape, count, false), inside = run(model, tape, count, true);
    expect_same_values(outside.classes, wanted.classes);
    expect_same_values(outside.numbers, wanted.numbers);
    for (const Pass* pass : {&outside, &inside}) {
      EXPECT_NEAR(pass->loss, wanted.loss, 1e-5f * std::abs(wanted.loss));
      expect_same_values(pass->by_mask, wanted.by_mask);
      ASSERT_EQ(pass->gradients.size(), wanted.gradients.size());
      for (std::size_t p = 0; p < wanted.gradients.size(); ++p)
        expect_same_values(pass->gradients[p], wanted.gradients[p]);
    }
    // Wherever a row's loss is computed, its gradient has the same bits, and what follows too. The sum of all rows' has
    // another order.
    EXPECT_EQ(inside.gradients, outside.gradients);
    EXPECT_EQ(inside.by_mask, outside.by_mask);
  }
}

INSTANTIATE_TEST_SUITE_P(Choices, SeveralDevices,
                         ::testing::Values(DeviceChoice{1, {0}, {}}, DeviceChoice{2, {0, 1}, {}},
                                           DeviceChoice{3, {0, 1, 2}, {}}, DeviceChoice{3, {2, 1}, 0},
                                           DeviceChoice{2, {1}, 0}, DeviceChoice{2, {0, 1}, 1}),
                         [](const auto& test) {
                           std::string name = "on";
                           for (const int id : test.param.ids) name += "_" + std::to_string(id);
                           return name + (test.param.output ? "_to_" + std::to_string(*test.param.output) : "");
                         });

class SeveralValues : public ::testing::Test {
 protected:
  nn::Vars inputs(std::int64_t count) {
    return {tape.input(random_rows(devices[0], {count, Fusion::kFeatures}, 1)),
            tape.input(random_rows(devices[0], {count, Fusion::kHidden}, 2))};
  }
  nn::Tensor labels(std::int64_t count) { return labels_of_rows(devices[0], count, Fusion::kClasses); }

  Devices devices = Devices::cpu(3);
  DataParallel model{fusion_on(devices[0]), devices};
  nn::Tape tape{devices[0]};
};

TEST_F(SeveralValues, TotalsCountWhatIsCorrect) {
  nn::Generator generator(1);
  nn::Context context{devices[0], generator};
  DataParallel several(nn::build<nn::Linear>(context, Fusion::kFeatures, Fusion::kClasses), devices);
  const nn::LossFunction loss = nn::make_loss();
  const nn::Var x = tape.input(random_rows(devices[0], {40, Fusion::kFeatures}, 1));
  const nn::Loss inside = several.forward_loss(tape, x, labels(40), loss, 0.1f);
  const nn::Loss outside = loss(tape, several(tape, x), labels(40), 0.1f);
  EXPECT_NEAR(inside.totals().f32()[0], outside.totals().f32()[0], 1e-5f * outside.totals().f32()[0]);
  EXPECT_EQ(inside.totals().f32()[1], outside.totals().f32()[1]);
  EXPECT_GT(outside.totals().f32()[1], 0);
  // A sum with another loss is a loss.
  tape.backward(nn::add(tape, inside.value, outside.value));
}

// A cross entropy with a penalty: counted on each device, and so in all.
TEST_F(SeveralValues, TotalsCountWhatIsCorrectBesideAPenalty) {
  nn::Generator generator(1);
  nn::Context context{devices[0], generator};
  DataParallel several(nn::build<nn::Linear>(context, Fusion::kFeatures, Fusion::kClasses), devices);
  const nn::LossFunction loss = [](nn::Tape& on, const nn::Vars& y, const nn::Tensor& targets, float scale) {
    return nn::Loss{nn::add(on, nn::cross_entropy(on, y[0], targets, scale).value,
                            nn::sum(on, nn::square(on, y[0]), 0.01f * scale).value)};
  };
  const nn::Var x = tape.input(random_rows(devices[0], {40, Fusion::kFeatures}, 1));
  const nn::Loss inside = several.forward_loss(tape, x, labels(40), loss, 0.1f);
  const nn::Loss outside = loss(tape, several(tape, x), labels(40), 0.1f);
  EXPECT_GT(outside.totals().f32()[1], 0);
  EXPECT_EQ(inside.totals().f32()[1], outside.totals().f32()[1]);
  // Another penalty outside of the replicas.
  const nn::Loss penalty = nn::sum(tape, nn::square(tape, x), 1.0f);
  EXPECT_EQ(nn::add(tape, penalty.value, inside.value).value().f32()[1], outside.totals().f32()[1]);
}

// Of an autoencoder, say.
TEST_F(SeveralValues, ALossWithoutTargets) {
  const nn::LossFunction squares = [](nn::Tape& on, const nn::Vars& y, const nn::Tensor& targets, float scale) {
    EXPECT_FALSE(targets.defined());
    return nn::sum(on, nn::square(on, y[0]), scale);
  };
  const nn::Loss inside = model.forward_loss(tape, inputs(10), nn::Tensor(), squares, 1.0f);
  const nn::Loss outside = squares(tape, model(tape, inputs(10)), nn::Tensor(), 1.0f);
  EXPECT_NEAR(inside.totals().f32()[0], outside.totals().f32()[0], 1e-5f * outside.totals().f32()[0]);
}

// Only sums of the loss travel: of each device two numbers.
TEST_F(SeveralValues, OutputsStayOnTheirDevices) {
  const auto bytes_out = [&](const auto& pass) {
    const auto before = model.use();
    pass();
    tape.reset();
    return model.use()[1].bytes_out - before[1].bytes_out;
  };
  tape.set_recording(false);
  EXPECT_EQ(bytes_out([&] { model(tape, inputs(9)); }), 3U * (Fusion::kClasses + Fusion::kNumbers) * 4);
  EXPECT_EQ(bytes_out([&] { model.forward_loss(tape, inputs(9), labels(9), joint_loss, 1.0f); }), 2U * 4);
}

TEST_F(SeveralValues, AnOutputThatNobodyUses) {
  for (const std::size_t used : {0U, 1U}) {
    const nn::Vars outputs = model(tape, inputs(10));
    const nn::Var y = outputs[used];
    tape.backward(nn::sum(tape, nn::square(tape, y), 1.0f).value);
    const auto parameters = model.named_parameters();
    EXPECT_TRUE(parameters[0].parameter->has_gradient());
    EXPECT_EQ(parameters[2].parameter->has_gradient(), used == 0);
    EXPECT_EQ(parameters[4].parameter->has_gradient(), used == 1);
    for (const auto& [name, parameter] : parameters) parameter->clear_grad();
    tape.reset();
  }
}

TEST_F(SeveralValues, InputsThatDoNotFit) {
  const auto of = [&](std::int64_t count, std::int64_t features) {
    return tape.input(random_rows(devices[0], {count, features}, 1));
  };
  EXPECT_THAT(refusal_of([&] {
                model(tape, {of(10, 6), of(9, 8)});
              }),
              AllOf(HasSubstr("input 1 is [9, 8], which is 9 entries along dim 0, and input 0 is [10, 6]"),
                    HasSubstr("give them the same extent there")));
  EXPECT_REFUSED("DataParallel was given no input", model(tape, nn::Vars()));
  EXPECT_REFUSED("replica 0 of 3 on cpu:0: Fusion takes 2 inputs, and was given 1", model(tape, of(10, 6)));
  EXPECT_REFUSED("the targets are [8], which is 8 entries along dim 0",
                 model.forward_loss(tape, inputs(10), labels(8), joint_loss, 1.0f));
  EXPECT_THAT(
      refusal_of([&] {
        model.forward_loss(
            tape, inputs(10), labels(10),
            [](nn::Tape& on, nn::Var y, const nn::Tensor& t, float s) { return nn::cross_entropy(on, y, t, s); }, 1.0f);
      }),
      HasSubstr("replica 0 of 3 on cpu:0: 2 values where 1 is expected"));
  EXPECT_THAT(
      refusal_of([&] {
        model.forward_loss(
            tape, inputs(10), labels(10),
            [](nn::Tape& on, const nn::Vars& y, const nn::Tensor&, float) { return nn::Loss{nn::affine(on, y[0], 2)}; },
            1.0f);
      }),
      HasSubstr("replica 0 of 3 on cpu:0: a loss function returned a value that is no loss"));
  nn::Tape other(devices[0]);
  const nn::Var elsewhere = other.input(random_rows(devices[0], {10, 8}, 1));
  EXPECT_REFUSED("a value of another tape", model(tape, {of(10, 6), elsewhere}));
}

// What devices hold at most: parameters, gradients, and a pass.
TEST(LossInReplicas, EvensOutTheMemoryOfTheFirstDevice) {
  constexpr std::int64_t kIn = 16, kOut = 4000, kSamples = 64;
  const auto peak = [&](bool inside) {
    Devices devices = Devices::cpu(4);
    nn::Generator generator(1);
    nn::Context context{devices[0], generator};
    DataParallel model(nn::build<nn::Linear>(context, kIn, kOut), devices);
    nn::Tape tape(devices[0]);
    const nn::LossFunction loss = nn::make_loss();
    for (int pass = 0; pass < 2; ++pass) {
      const nn::Var x = tape.input(random_rows(devices[0], {kSamples, kIn}, 1));
      const nn::Tensor labels = labels_of_rows(devices[0], kSamples, kOut);
      tape.backward(inside ? model.forward_loss(tape, x, labels, loss, 0.1f).value
                           : loss(tape, model(tape, x), labels, 0.1f).value);
      tape.reset();
      for (const auto& [name, parameter] : model.named_parameters()) parameter->clear_grad();
    }
    std::vector<std::uint64_t> peaks;
    for (int d = 0; d < 4; ++d) peaks.push_back(devices[d].allocator().stats().peak_bytes_asked);
    return peaks;
  };
  const auto outside = peak(false), inside = peak(true);
  // The logits of a device's piece and their gradient are 2 · 16 · 4000 f32, those of the batch four times as much.
  const std::uint64_t piece = 2 * kSamples / 4 * kOut * 4;
  RecordProperty("outside", std::to_string(outside[0]));
  RecordProperty("inside", std::to_string(inside[0]));
  EXPECT_GE(outside[0], inside[0] + 3 * piece);
  EXPECT_LT(inside[0], inside[1] + piece) << "hardly more than the others";
}

}  // namespace
}  // namespace lockstep::parallel
