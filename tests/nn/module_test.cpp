// What modules are as a whole: their printed structure, and forward passes that differ from call to call.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class ModuleTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
};

TEST_F(ModuleTest, PrintsItsStructureAsPyTorchDoes) {
  Sequential model;
  auto part = std::make_unique<Sequential>();
  part->then(std::make_unique<Conv2d>(context, 64, 8, Window{{3, 5}, {1, 1}, {0, 0}}))
      .then(std::make_unique<AvgPool2d>(Window{{2, 2}, {2, 2}, {0, 0}}));
  model.then(std::make_unique<Conv2d>(context, 3, 64, Window{{7, 7}, {2, 2}, {3, 3}}, false))
      .then(std::make_unique<BatchNorm>(context, 64))
      .then(std::make_unique<ReLU>())
      .then(std::make_unique<MaxPool2d>(Window{{3, 3}, {2, 2}, {1, 1}}))
      .then(std::move(part))
      .then(std::make_unique<Flatten>())
      .then(std::make_unique<Conv2d>(context, 6, 12, Window{{3, 3}, {2, 2}, {1, 1}}, false, 6))
      .then(std::make_unique<ConvTranspose2d>(context, 6, 9, Window{{3, 3}, {1, 1}, {0, 0}},
                                              std::array<std::int64_t, 2>{0, 0}, true, 3))
      .then(std::make_unique<Linear>(context, 10, 1))
      .then(std::make_unique<Linear>(context, 4, 2, false))
      .then(std::make_unique<Embedding>(context, 10, 3))
      .then(std::make_unique<LayerNorm>(context, 768))
      .then(std::make_unique<GELU>(GeluKind::kTanh))
      .then(std::make_unique<Dropout>(0.1, 0))
      .then(std::make_unique<Lstm>(context, 64, 128, RecurrentOptions{.num_layers = 2, .dropout = 0.5}));
  // print(model) of PyTorch 2.15.
  EXPECT_EQ(to_string(model), R"(Sequential(
  (0): Conv2d(3, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
  (1): BatchNorm2d(64, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
  (2): ReLU()
  (3): MaxPool2d(kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False)
  (4): Sequential(
    (0): Conv2d(64, 8, kernel_size=(3, 5), stride=(1, 1))
    (1): AvgPool2d(kernel_size=2, stride=2, padding=0)
  )
  (5): Flatten(start_dim=1, end_dim=-1)
  (6): Conv2d(6, 12, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=6, bias=False)
  (7): ConvTranspose2d(6, 9, kernel_size=(3, 3), stride=(1, 1), groups=3)
  (8): Linear(in_features=10, out_features=1, bias=True)
  (9): Linear(in_features=4, out_features=2, bias=False)
  (10): Embedding(10, 3)
  (11): LayerNorm((768,), eps=1e-05, elementwise_affine=True, bias=True)
  (12): GELU(approximate='tanh')
  (13): Dropout(p=0.1, inplace=False)
  (14): LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.5)
))");
}

/// The middle layer is used as often as the caller says: a graph that differs from pass to pass.
class Repeated final : public Module {
 public:
  explicit Repeated(Context& context)
      : middle_(register_module("middle", std::make_unique<Linear>(context, 3, 3))),
        last_(register_module("last", std::make_unique<Linear>(context, 3, 1, false))) {}
  Var forward(Tape& tape, Var x) override {
    for (int i = 0; i < times; ++i) x = middle_.forward(tape, x, Epilogue::kRelu);
    return last_.forward(tape, x);
  }
  int times = 0;

 private:
  Linear& middle_;
  Linear& last_;
};

TEST_F(ModuleTest, PrintsTheNamesOfOnesOwn) {
  EXPECT_EQ(to_string(Repeated(context)), R"(Repeated(
  (middle): Linear(in_features=3, out_features=3, bias=True)
  (last): Linear(in_features=3, out_features=1, bias=False)
))");
}

// A child that is the caller's.
class Around final : public Module {
 public:
  explicit Around(Module& inside) : inside_(inside) { register_borrowed("inside", inside); }
  Var forward(Tape& tape, Var x) override { return inside_.forward(tape, x); }

 private:
  Module& inside_;
};

TEST_F(ModuleTest, FactoryBuildsItAgain) {
  auto first = build<Linear>(context, 5, 2, false);
  EXPECT_EQ(std::make_unique<Linear>(context, 5, 2)->factory(), nullptr);
  const auto other_backend = make_cpu_backend(1);
  Generator other_generator = Generator::zeros();
  Context other{*other_backend, other_generator};
  const auto second = first->factory()(other);
  ASSERT_EQ(second->named_parameters().size(), 1u);
  EXPECT_EQ(second->named_parameters()[0].parameter->value().shape(), (Shape{2, 5}));
  EXPECT_EQ(&second->named_parameters()[0].parameter->backend(), other_backend.get());
  const auto put_together = build_from(context, [](Context& c) {
    auto made = std::make_unique<Sequential>();
    made->then(std::make_unique<Linear>(c, 5, 4)).then(std::make_unique<Linear>(c, 4, 1));
    return made;
  });
  EXPECT_EQ(to_string(*put_together->factory()(other)), to_string(*put_together));
}

TEST_F(ModuleTest, TakesTheModesOfAnother) {
  const auto make = [&] {
    auto made = std::make_unique<Sequential>();
    auto part = std::make_unique<Sequential>();
    part->then(std::make_unique<Conv2d>(context, 1, 2, Window{{1, 1}, {1, 1}, {0, 0}}))
        .then(std::make_unique<BatchNorm>(context, 2));
    Sequential& inside = *part;
    made->then(std::move(part)).then(std::make_unique<Dropout>(0.5, 0));
    return std::pair<std::unique_ptr<Sequential>, Sequential*>(std::move(made), &inside);
  };
  const auto [like, like_inside] = make();
  const auto [copy, copy_inside] = make();
  like_inside->train(false);
  copy->take_modes(*like);
  EXPECT_TRUE(copy->training());
  EXPECT_FALSE(copy_inside->training());
  like->fuse();
  copy->take_modes(*like);
  EXPECT_TRUE(copy->fused() && !copy->training());
}

TEST_F(ModuleTest, MayBorrowAChild) {
  Linear inside(context, 3, 2);
  {
    Around around(inside);
    EXPECT_EQ(around.named_parameters()[0].name, "inside.weight");
    around.train(false);
  }
  EXPECT_FALSE(inside.training());
}

TEST_F(ModuleTest, ForwardMayDifferFromPassToPass) {
  Repeated model(context);
  Parameter& middle = *model.named_parameters()[0].parameter;
  int ready = 0;
  middle.on_ready = [&ready] { ++ready; };
  Tape tape(*backend);
  const Tensor x = tensor_of(*backend, {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
  const Tensor target = tensor_of(*backend, {2, 1}, std::vector<float>{1, -1});
  for (const int times : {2, 0, 3, 1}) {
    model.times = times;
    ready = 0;
    for (const auto& named : model.named_parameters()) named.parameter->clear_grad();
    tape.backward(squared_error(tape, model.forward(tape, tape.input(x)), target, 1.0f).value);
    tape.reset();
    EXPECT_EQ(ready, times > 0 ? 1 : 0) << "once, however often it was used";
    EXPECT_EQ(middle.has_gradient(), times > 0);
  }
}

TEST_F(ModuleTest, IsCalledLikeAFunctionOnValuesOfTheHost) {
  Linear model(context, 3, 2);
  Tape tape(*backend);
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const Tensor x = nn::tensor_of(*backend, {2, 3}, values);
  EXPECT_EQ(x.shape(), (Shape{2, 3}));
  EXPECT_EQ(values_of(*backend, x), values);
  EXPECT_EQ(values_of(*backend, model(tape, tape.input(x)).value()),
            values_of(*backend, model.forward(tape, tape.input(x)).value()));
  EXPECT_EQ(values_of(*backend, backend->empty({0, 3})), std::vector<float>());
  EXPECT_THROW(nn::tensor_of(*backend, {2, 2}, values), UsageError);
  EXPECT_THROW(nn::tensor_of(*backend, {-2, -3}, values), UsageError);
}

/// Ones, which come when somebody waits.
class LateOnes final : public ValueSource {
 public:
  explicit LateOnes(Parameter& parameter) : parameter_(parameter), memory_(parameter.value()) {
    parameter.expect_value(*this, 7);
  }
  void wait_for_values(std::size_t key) override {
    EXPECT_EQ(key, 7u);
    ++waits;
    if (fails) throw DeviceError("they do not come", "");
    std::fill_n(memory_.f32(), memory_.count(), 1.0f);
    parameter_.end_expectation();
  }
  int waits = 0;
  bool fails = false;

 private:
  Parameter& parameter_;
  Tensor memory_;
};

// Whatever reads the value, in whatever form.
TEST_F(ModuleTest, PendingValueIsAwaited) {
  using Reader = std::function<float(Parameter&)>;
  Parameter other(*backend, {2, 16});
  const Tensor elsewhere = backend->empty({2, 16});
  Linear linear(context, 16, 2, false);
  const Reader readers[] = {
      [](Parameter& p) { return p.value().f32()[3]; },
      [](Parameter& p) { return p.as(DType::kF32).f32()[3]; },
      [](Parameter& p) { return p.as(DType::kBF16).data<BFloat16>()[3].to_float(); },
      [&](Parameter& p) {
        other.share_value(p);
        return other.value().f32()[3];
      },
      [&](Parameter& p) {
        p.move_value(elsewhere);
        return elsewhere.f32()[3];
      },
      [&](Parameter& p) {
        p.quantize_rows();
        return p.int8_rows()->scales.f32()[0] * 127;
      },
  };
  for (std::size_t i = 0; i < std::size(readers); ++i) {
    Parameter parameter(*backend, {2, 16});
    backend->pointwise().fill(parameter.value(), 0.0f);
    LateOnes ones(parameter);
    EXPECT_NEAR(readers[i](parameter), 1.0f, 1e-6f) << "reader " << i;
    EXPECT_EQ(ones.waits, 1) << "reader " << i;
    EXPECT_EQ(parameter.value().f32()[3], 1.0f);
    EXPECT_EQ(ones.waits, 1) << "it waits once";
  }
  // A layer in a pass.
  const auto weight = linear.named_parameters().front().parameter;
  backend->pointwise().fill(weight->value(), 0.0f);
  LateOnes ones(*weight);
  Tape tape(*backend);
  const Var y = linear.forward(tape, tape.input(nn::tensor_of(*backend, {1, 16}, std::vector<float>(16, 0.5f))));
  EXPECT_EQ(y.value().f32()[0], 8.0f);
  // What goes wrong on its way comes out, each time.
  LateOnes lost(*weight);
  lost.fails = true;
  EXPECT_THROW(weight->value(), DeviceError);
  EXPECT_THROW(weight->value(), DeviceError);
  weight->end_expectation();
}

}  // namespace
}  // namespace lockstep::nn
