// Modules of several inputs and outputs, and passes that end in several values.
#include <gmock/gmock.h>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/ops/transfer.h"
#include "tests/nn/values.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::Fusion;
using lockstep::testing::joint_loss;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

class SeveralValues : public ::testing::Test {
 protected:
  std::vector<std::vector<float>> gradients() {
    std::vector<std::vector<float>> all;
    for (const auto& [name, parameter] : model.named_parameters()) {
      all.push_back(values_of(*backend, parameter->gradient()));
      parameter->clear_grad();
    }
    return all;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
  Fusion model{context};
  Tensor x = random_tensor(*backend, {5, Fusion::kFeatures}, 1);
  Tensor mask = random_tensor(*backend, {5, Fusion::kHidden}, 2);
  Tape tape{*backend};
};

TEST_F(SeveralValues, ComeAsTheyAreReturned) {
  const auto [classes, numbers] = model(tape, {tape.input(x), tape.input(mask)}).as<2>();
  EXPECT_EQ(classes.shape(), (Shape{5, Fusion::kClasses}));
  EXPECT_EQ(numbers.shape(), (Shape{5, Fusion::kNumbers}));
}

TEST_F(SeveralValues, AreOneWhereThereIsOne) {
  class Masked final : public Module {
   public:
    Vars forward_all(Tape& on, const Vars& inputs) override {
      const auto [value, by] = take<2>(inputs);
      return mul(on, value, by);
    }
  };
  Masked masked;
  const Var y = masked(tape, {tape.input(x), tape.input(x)});
  EXPECT_EQ(y.value().f32()[3], x.f32()[3] * x.f32()[3]);
  // Whichever of the two functions a module has, both may be called.
  class Doubled final : public Module {
   public:
    Vars forward_all(Tape& on, const Vars& inputs) override { return add(on, inputs[0], inputs[0]); }
  };
  Doubled doubled;
  EXPECT_EQ(doubled(tape, tape.input(x)).value().f32()[3], 2 * x.f32()[3]);
  Sequential in_a_row;
  in_a_row.then(std::make_unique<Doubled>()).then(std::make_unique<Doubled>());
  EXPECT_EQ(Var(in_a_row.forward_all(tape, tape.input(x))).value().f32()[3], 4 * x.f32()[3]);
}

TEST_F(SeveralValues, AsManyAsThereAre) {
  Vars many;
  for (int i = 0; i < 20; ++i) many.push_back(tape.input(tensor_of(*backend, {1}, {static_cast<float>(i)})));
  const Vars copy = many;
  ASSERT_EQ(copy.size(), 20U);
  for (std::size_t i = 0; i < copy.size(); ++i) EXPECT_EQ(copy[i].value().f32()[0], static_cast<float>(i));
  const Vars moved = std::move(many);
  EXPECT_EQ(moved[19].value().f32()[0], 19.0f);
  EXPECT_TRUE(Vars().empty());
}

TEST_F(SeveralValues, WrongNumbers) {
  const Var value = tape.input(x);
  EXPECT_REFUSED("Fusion takes 2 inputs, and was given 1 → give", model(tape, value));
  EXPECT_REFUSED("takes 2 inputs, and was given 3", model(tape, {value, value, value}));
  Linear layer(context, Fusion::kFeatures, 2);
  EXPECT_THAT(refusal_of([&] {
                layer(tape, {value, value});
              }),
              AllOf(HasSubstr("Linear takes 1 input, and was given 2"), HasSubstr("overrides forward_all()")));
  EXPECT_REFUSED("Linear takes 1 input, and was given 0", layer(tape, Vars()));
  const Vars both = model(tape, {value, tape.input(mask)});
  EXPECT_REFUSED("2 values where 1 is expected", static_cast<void>(Var(both)));
  EXPECT_REFUSED("2 values where 3 are expected", both.as<3>());
  EXPECT_REFUSED("value 2 of 2", both[2]);

  class Twice final : public Module {
   public:
    Vars forward_all(Tape&, const Vars& inputs) override { return {inputs[0], inputs[0]}; }
  };
  EXPECT_THAT(refusal_of([&] { Twice()(tape, value); }),
              AllOf(HasSubstr("Twice returns 2 values, and one is taken"), HasSubstr("forward_all(tape, x)")));
  class Nothing final : public Module {};
  for (int i = 0; i < 2; ++i) {
    Nothing nothing;
    EXPECT_THAT(refusal_of([&] { nothing(tape, value); }),
                AllOf(HasSubstr("Nothing has no forward pass"), HasSubstr("override forward(Tape&, Var)")));
  }
}

TEST_F(SeveralValues, LossesOfOneOutputAndOfSeveral) {
  const LossFunction of_one = [](Tape& on, Var y, const Tensor& targets, float scale) {
    return squared_error(on, y, targets, scale);
  };
  const LossFunction of_several = joint_loss;
  std::vector<std::int32_t> numbers(5, 1);
  const Tensor labels = backend->from_host(numbers.data(), {5}, DType::kI32);
  const Vars inputs = {tape.input(x), tape.input(mask)};
  const Loss joint = model.forward_loss(tape, inputs, labels, of_several, 0.2f);
  EXPECT_TRUE(joint.value.is_loss());
  EXPECT_REFUSED("2 values where 1 is expected", model.forward_loss(tape, inputs, labels, of_one, 0.2f));
  Linear layer(context, Fusion::kFeatures, 2);
  EXPECT_GT(layer.forward_loss(tape, tape.input(x), backend->zeros({5, 2}), of_one, 1.0f).totals().f32()[0], 0);
}

TEST_F(SeveralValues, BackwardFromSeveralIsThatOfTheirSum) {
  const Tensor by_classes = random_tensor(*backend, {5, Fusion::kClasses}, 3);
  const Tensor by_numbers = random_tensor(*backend, {5, Fusion::kNumbers}, 4);
  const auto pass = [&] { return model(tape, {tape.input(x), tape.input(mask)}); };
  const auto weigh = [&](Var y, const Tensor& by) { return sum(tape, mul(tape, y, tape.input(by)), 1.0f).value; };
  const Vars known = pass();
  tape.backward(add(tape, weigh(known[0], by_classes), weigh(known[1], by_numbers)));
  tape.reset();
  const auto wanted = gradients();

  const Vars roots = pass();
  const Tensor grads[] = {by_classes, by_numbers};
  tape.backward({roots.begin(), roots.size()}, grads);
  EXPECT_EQ(roots[0].value().shape(), (Shape{5, Fusion::kClasses}));  // as that of one
  tape.reset();
  EXPECT_EQ(gradients(), wanted);

  // One that nobody has asked for: its layer gets no gradient.
  const Vars again = pass();
  const Tensor one[] = {by_classes, Tensor()};
  tape.backward({again.begin(), again.size()}, one);
  EXPECT_TRUE(model.named_parameters()[2].parameter->has_gradient());
  EXPECT_FALSE(model.named_parameters()[4].parameter->has_gradient());
  tape.reset();

  const Vars last = pass();
  const std::span<const Var> both{last.begin(), last.size()};
  const Tensor none[] = {Tensor(), Tensor()}, swapped[] = {by_numbers, by_classes};
  EXPECT_REFUSED("backward from no value", tape.backward(both, none));
  EXPECT_REFUSED("2 values with 1 gradients", tape.backward(both, std::span(none, 1)));
  EXPECT_REFUSED("with a gradient of f32 [5, 2]", tape.backward(both, swapped));
  // A refusal leaves nothing of what came before it.
  const Tensor wrong[] = {by_classes, by_classes};
  EXPECT_REFUSED("with a gradient of f32 [5, 3]", tape.backward(both, wrong));
  for (const auto& [name, parameter] : model.named_parameters()) parameter->clear_grad();
  tape.backward(both, grads);
  tape.reset();
  EXPECT_EQ(gradients(), wanted);
}

}  // namespace
}  // namespace lockstep::nn
