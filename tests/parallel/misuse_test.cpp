// DataParallel in a program that uses it wrongly, or with nothing to compute.
#include <gmock/gmock.h>

#include <optional>

#include "base/error.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"
#include "tests/support/refusal.h"

namespace lockstep::parallel {
namespace {

class DataParallelMisuse : public ::testing::Test {
 protected:
  std::unique_ptr<nn::Module> layer() {
    nn::Generator generator(1);
    nn::Context context{devices[0], generator};
    return nn::build<nn::Linear>(context, std::int64_t{4}, std::int64_t{3});
  }
  nn::Tensor rows(std::int64_t count) { return devices[0].zeros({count, 4}); }
  static nn::Var loss_of(nn::Tape& tape, nn::Var y) { return nn::squared_error(tape, y, y.value(), 1.0f).value; }

  Devices devices = Devices::cpu(3);
  std::optional<DataParallel> model{std::in_place, layer(), devices};
  nn::Tape tape{devices[0]};
};

TEST_F(DataParallelMisuse, NoSamples) {
  const nn::Var y = (*model)(tape, tape.input(rows(0)));
  EXPECT_EQ(y.shape(), (nn::Shape{0, 3}));
  tape.backward(loss_of(tape, y));
  tape.reset();
  // And with results on another device than the first.
  DataParallel elsewhere(layer(), devices, {0, 1}, 2);
  nn::Tape there(devices[2]);
  const nn::Var z = elsewhere.forward(there, rows(0), devices[0]);
  EXPECT_EQ(z.shape(), (nn::Shape{0, 3}));
  there.backward(loss_of(there, z));
}

TEST_F(DataParallelMisuse, ItEndsBeforeBackward) {
  const nn::Var loss = loss_of(tape, (*model)(tape, tape.input(rows(6))));
  model.reset();
  EXPECT_REFUSED("a DataParallel that is gone", tape.backward(loss));
  tape.reset();
}

TEST_F(DataParallelMisuse, ItEndsBeforeItsTape) {
  (*model)(tape, tape.input(rows(6)));
  model.reset();
  tape.reset();
  model.emplace(layer(), devices);
  (*model)(tape, tape.input(rows(6)));  // the model ends after the tape here
}

TEST_F(DataParallelMisuse, AValueOfAnotherTape) {
  nn::Tape other(devices[0]);
  const nn::Var x = other.input(rows(6));
  EXPECT_REFUSED("of another tape", (*model)(tape, x));
  other.reset();
  EXPECT_REFUSED("its tape has forgotten", (*model)(tape, x));
  EXPECT_REFUSED("of another tape", (*model)(other, tape.input(rows(6))));
}

TEST_F(DataParallelMisuse, WrongShapesNameTheDevice) {
  EXPECT_REFUSED("Linear with a weight of [3, 4] was given [2, 5]",
                 (*model)(tape, tape.input(devices[0].zeros({6, 5}))));
  EXPECT_REFUSED("replica 0 of 3 on cpu:0: Linear was given [2, 4] of i32",
                 (*model)(tape, tape.input(devices[0].empty({6, 4}, DType::kI32))));
}

// What a module returns that computes its loss itself is a loss.
class WithLoss final : public nn::Module {
 public:
  explicit WithLoss(nn::Context& context)
      : layer_(register_module("layer", std::make_unique<nn::Linear>(context, 4, 3))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override { return loss_of(tape, layer_.forward(tape, x)); }

 private:
  static nn::Var loss_of(nn::Tape& tape, nn::Var y) { return nn::squared_error(tape, y, y.value(), 1.0f).value; }
  nn::Linear& layer_;
};

TEST_F(DataParallelMisuse, AModuleThatReturnsItsLoss) {
  nn::Generator generator(1);
  nn::Context context{devices[0], generator};
  DataParallel with_loss(nn::build<WithLoss>(context), devices);
  tape.backward(with_loss(tape, tape.input(rows(6))));
  EXPECT_TRUE(with_loss.named_parameters().front().parameter->has_gradient());
  tape.reset();
  EXPECT_REFUSED("which is no loss", tape.backward((*model)(tape, tape.input(rows(6)))));
}

}  // namespace
}  // namespace lockstep::parallel
