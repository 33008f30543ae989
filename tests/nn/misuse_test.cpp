// Errors for a program that uses the library wrongly: never a signal, an internal error or silence.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Misuse : public ::testing::Test {
 protected:
  Loss loss_of(Var y) { return squared_error(tape, y, y.value(), 1.0f); }
  std::unique_ptr<Linear> linear_layer() { return std::make_unique<Linear>(context, 4, 3); }
  Tensor of_type(const Shape& shape, DType dtype) { return backend->empty(shape, dtype); }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
  std::unique_ptr<Linear> layer = linear_layer();
  Tensor x = random_tensor(*backend, {5, 4}, 1);
  Tape tape{*backend};
};

// Vars.

TEST_F(Misuse, AVarReadAfterBackward) {
  const Var hidden = layer->forward(tape, tape.input(x));
  const Tensor kept = hidden.value();
  const Loss loss = loss_of(hidden);
  tape.backward(loss.value);
  EXPECT_REFUSED("copy value() before Tape::backward()", hidden.value().f32());
  EXPECT_REFUSED("after backward", hidden.shape());
  EXPECT_EQ(loss.totals().count(), 2);     // the root's is there
  EXPECT_EQ(values_of(kept).size(), 15u);  // and what was copied
}

TEST_F(Misuse, AVarReadAfterResetOrTheTapesEnd) {
  const Var before = tape.input(x);
  tape.reset();
  EXPECT_REFUSED("its tape has forgotten", before.value());
  const Var again = tape.input(x);
  EXPECT_EQ(again.value().f32(), x.f32());
  EXPECT_REFUSED("its tape has forgotten", before.value());  // though its place is in use
  Var orphan;
  {
    Tape short_lived(*backend);
    orphan = short_lived.input(x);
  }
  EXPECT_REFUSED("before the tape ends", orphan.needs_grad());
  EXPECT_REFUSED("no value of any tape", Var().value());
  EXPECT_REFUSED("no value of any tape", layer->forward(tape, Var()));
  EXPECT_REFUSED("its tape has forgotten", layer->forward(tape, before));
}

TEST_F(Misuse, AVarOfAnotherTape) {
  Tape other(*backend);
  const Var elsewhere = other.input(x);
  EXPECT_REFUSED("of another tape", layer->forward(tape, elsewhere));
  EXPECT_REFUSED("of another tape", add(tape, tape.input(x), elsewhere));
  const Loss loss = loss_of(layer->forward(tape, tape.input(x)));
  EXPECT_REFUSED("of another tape", other.backward(loss.value));
}

TEST_F(Misuse, MemoryForGradientsOfAnotherTypeOrLayout) {
  Parameter& weight = *layer->named_parameters()[0].parameter;  // (3, 4)
  const Tensor right = backend->empty({3, 4});
  weight.bind_gradient(right);
  EXPECT_REFUSED("a parameter f32 [3, 4] is given bf16 [3, 4] for its gradient → give memory of",
                 weight.bind_gradient(of_type({3, 4}, DType::kBF16)));
  EXPECT_REFUSED("is given f32 [4, 3]", weight.bind_gradient(backend->empty({4, 3})));
  EXPECT_REFUSED("is given f32 [3, 4] for its gradient, whose rows lie apart",
                 weight.bind_gradient(Tensor::empty(backend->allocator(), {3, 4}, DType::kF32, /*pitch=*/8)));
  EXPECT_REFUSED("is given no memory", weight.bind_gradient(Tensor()));
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  EXPECT_EQ(weight.gradient().raw(), right.raw());  // it is as it was
}

TEST_F(Misuse, GradientsThatAreNotThere) {
  const Var in = tape.differentiable_input(x);
  EXPECT_REFUSED("holds nothing", tape.grad(in).f32());
  EXPECT_REFUSED("holds nothing", values_of(*backend, tape.grad(in)));
  const auto parameters = layer->named_parameters();
  EXPECT_REFUSED("holds nothing", parameters[0].parameter->gradient().f32());
  EXPECT_REFUSED("holds nothing", tape.input(Tensor()));
}

// Backward.

TEST_F(Misuse, BackwardTwice) {
  const Loss loss = loss_of(layer->forward(tape, tape.input(x)));
  tape.backward(loss.value);
  EXPECT_REFUSED("walked already", tape.backward(loss.value));
  // Nor is what has been walked part of another loss.
  EXPECT_REFUSED("walked already", add(tape, loss.value, loss.value));
  // A pass recorded after it has its own root.
  const Loss next = loss_of(layer->forward(tape, tape.input(x)));
  EXPECT_REFUSED("walked already", tape.backward(loss.value));
  tape.backward(next.value);
}

TEST_F(Misuse, BackwardTwiceFromAnyValue) {
  const Var y = layer->forward(tape, tape.input(x));
  const auto walk = [&] { tape.backward(y, random_tensor(*backend, {5, 3}, 2)); };
  walk();
  EXPECT_THAT(refusal_of(walk), HasSubstr("walked already"));
}

TEST_F(Misuse, BackwardFromNonScalar) {
  const Var y = layer->forward(tape, tape.input(x));
  EXPECT_THAT(refusal_of([&] { tape.backward(y); }),
              AllOf(HasSubstr("backward from [5, 3], which is no loss"), HasSubstr("cross_entropy")));
  EXPECT_REFUSED("with a gradient of nothing", tape.backward(y, Tensor()));
  EXPECT_REFUSED("[3, 5]", tape.backward(y, random_tensor(*backend, {3, 5}, 2)));
  tape.backward(y, random_tensor(*backend, {5, 3}, 2));
}

TEST_F(Misuse, TheSumOfTwoLossesIsOne) {
  const Var y = layer->forward(tape, tape.input(x));
  tape.backward(add(tape, loss_of(y).value, loss_of(y).value));
  EXPECT_TRUE(layer->named_parameters()[0].parameter->has_gradient());
}

TEST_F(Misuse, BackwardAfterAnErrorInBackward) {
  const auto pass = [&] { return loss_of(layer->forward(tape, tape.input(x))).value; };
  layer->named_parameters()[0].parameter->on_ready = [] { throw std::runtime_error("a hook"); };
  const Var root = pass();
  EXPECT_THROW(tape.backward(root), std::runtime_error);
  EXPECT_REFUSED("ended with an error", tape.backward(root));
  layer->named_parameters()[0].parameter->on_ready = nullptr;
  tape.reset();
  tape.backward(pass());
}

TEST_F(Misuse, ForwardWithoutRecordingThenBackward) {
  tape.set_recording(false);
  const Loss loss = loss_of(layer->forward(tape, tape.input(x)));
  EXPECT_REFUSED("while the tape is recording", tape.backward(loss.value));
  // Evaluation mode alone is another thing: dropout and normalisation differ, gradients flow.
  tape.set_recording(true);
  layer->train(false);
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
}

// Ends that come too early.

TEST_F(Misuse, AModuleThatEndsBeforeBackward) {
  const Loss loss = loss_of(layer->forward(tape, tape.input(x)));
  layer.reset();
  layer = linear_layer();  // in the same memory, perhaps
  EXPECT_REFUSED("linear, whose parameters are no longer there", tape.backward(loss.value));
  tape.reset();
}

TEST_F(Misuse, AModuleThatEndsBeforeItsTape) {
  {
    const auto short_lived = linear_layer();
    short_lived->forward(tape, tape.input(x));
  }
  tape.reset();
  {
    const auto short_lived = linear_layer();
    short_lived->forward(tape, tape.input(x));
  }  // and the fixture's tape ends with that
}

TEST_F(Misuse, AModuleThatEndsBeforeItsOptimizer) {
  const auto optimizer = make_sgd(layer->named_parameters(), {});
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  layer.reset();
  EXPECT_REFUSED("weight is no longer there", optimizer->step(0.1));
  EXPECT_REFUSED("weight is no longer there", optimizer->zero_grad());
}

struct OwnListener final : BackwardListener {
  void backward_begins() override {}
  void node_walked() override {}
  void backward_ended() override {}
};

TEST_F(Misuse, AListenerThatEndsBeforeBackward) {
  std::optional<OwnListener> listener(std::in_place);
  const Loss loss = loss_of(layer->forward(tape, tape.input(x)));
  tape.set_listener(&*listener);
  EXPECT_EQ(tape.listener(), &*listener);
  listener.reset();
  EXPECT_EQ(tape.listener(), nullptr);
  EXPECT_REFUSED("no longer there", tape.backward(loss.value));
}

// Modules.

class Registrar final : public Module {
 public:
  Var forward(Tape&, Var x) override { return x; }
  using Module::register_borrowed;
  using Module::register_buffer;
  using Module::register_module;
  using Module::register_parameter;
};

TEST_F(Misuse, NamesOfAModule) {
  Registrar module;
  const auto parameter = [&] { return std::make_unique<Parameter>(*backend, Shape{2}); };
  module.register_module("fc", linear_layer());
  module.register_parameter("scale", parameter());
  module.register_buffer("mean", *backend, x);
  const char* const taken = "already";
  for (const std::string name : {"fc", "scale", "mean"}) {
    EXPECT_REFUSED(taken, module.register_module(name, linear_layer()));
    EXPECT_REFUSED(taken, module.register_borrowed(name, *layer));
    EXPECT_REFUSED(taken, module.register_parameter(name, parameter()));
    EXPECT_REFUSED(taken, module.register_buffer(name, *backend, x));
  }
  for (const std::string name : {"fc.0", "fc.weight", "scale.x"})
    EXPECT_REFUSED(taken, module.register_module(name, linear_layer()));
  for (const std::string name : {"", ".", "a.", ".a"})
    EXPECT_REFUSED("give it a name", module.register_module(name, linear_layer()));
  EXPECT_NO_THROW(module.register_module("h.0", linear_layer()));  // as GPT-2's blocks are called
  EXPECT_NO_THROW(module.register_module("h.1", linear_layer()));
  EXPECT_REFUSED(taken, module.register_module("h", linear_layer()));
  EXPECT_REFUSED("is nothing", module.register_module("no", std::unique_ptr<Linear>()));
  EXPECT_REFUSED("is nothing", module.register_parameter("no", nullptr));
  EXPECT_REFUSED("the module itself", module.register_borrowed("no", module));
  Sequential steps;
  EXPECT_REFUSED("is nothing", steps.then(std::unique_ptr<Linear>()));
  EXPECT_EQ(module.named_parameters().size(), 7u);  // what was refused has left nothing
}

TEST_F(Misuse, LayersOfNoSize) {
  EXPECT_REFUSED("an LSTM of 0 layers", Lstm(context, 3, 4, {.num_layers = 0}));
  LayerNorm norm(context, 0);
  EXPECT_REFUSED("LayerNorm", norm.forward(tape, tape.input(backend->empty({2, 0}))));
  BatchNorm batch(context, 0);
  EXPECT_REFUSED("BatchNorm", batch.forward(tape, tape.input(backend->empty({2, 0}))));
  Conv2d still(context, 2, 3, Window{.kernel = {3, 3}, .stride = {0, 1}});
  EXPECT_REFUSED("stride", still.forward(tape, tape.input(backend->zeros({1, 4, 4, 2}))));
}

TEST_F(Misuse, GroupsThatDoNotDivideChannels) {
  const Window window = {.kernel = {3, 3}, .padding = {1, 1}};
  for (const std::int64_t groups : {4, 0, -1, 9}) {
    const std::string what = fmt::format("of 6 to 8 channels in {} groups", groups);
    EXPECT_REFUSED("Conv2d " + what, Conv2d(context, 6, 8, window, true, groups));
    EXPECT_REFUSED("Conv2d " + what, Conv2d(context, 6, 8, window, Conv2d::FanOut{}, groups));
    EXPECT_REFUSED("Conv1d " + what, Conv1d(context, 6, 8, 3, 1, 0, true, groups));
    EXPECT_REFUSED("ConvTranspose2d " + what, ConvTranspose2d(context, 6, 8, window, {0, 0}, true, groups));
  }
  const auto w = std::make_unique<Parameter>(*backend, Shape{8, 3, 3, 3});
  const auto convolve = [&](std::int64_t channels, std::int64_t groups) {
    return conv2d(tape, tape.input(backend->zeros({1, 4, 4, channels})), *w, nullptr, window, Epilogue::kNone, groups);
  };
  EXPECT_NO_THROW(convolve(6, 2));
  EXPECT_REFUSED("Conv2d of 9 to 8 channels in 3 groups", convolve(9, 3));
  EXPECT_REFUSED("Conv2d with a weight of [8, 3, 3, 3] in 2 groups was given [1, 4, 4, 12]", convolve(12, 2));
  EXPECT_REFUSED("Conv2d with a weight of [8, 3, 3, 3] was given [1, 4, 4, 6]", convolve(6, 1));
  const auto v = std::make_unique<Parameter>(*backend, Shape{8, 3, 3});
  EXPECT_REFUSED("Conv1d with a weight of [8, 3, 3] in 2 groups was given [1, 5, 8]",
                 conv1d(tape, tape.input(backend->zeros({1, 5, 8})), *v, nullptr, 1, 1, 2));
  EXPECT_REFUSED("ConvTranspose2d of 8 to 9 channels in 3 groups",
                 conv_transpose2d(tape, tape.input(backend->zeros({1, 4, 4, 8})), *w, nullptr, window, {0, 0}, 3));
}

// Operands. Each layer of a type, shape or device that it does not take.

TEST_F(Misuse, WrongTypesAndShapesIntoEachLayer) {
  Conv2d conv(context, 2, 3, Window{.kernel = {3, 3}});
  BatchNorm batch_norm(context, 2);
  LayerNorm layer_norm(context, 2);
  RMSNorm rms_norm(context, 2);
  GroupNorm group_norm(context, 2, 2);
  Conv1d conv1d(context, 2, 3, 3);
  ConvTranspose2d transposed(context, 2, 3, Window{.kernel = {3, 3}});
  SiLU silu_layer;
  Sigmoid sigmoid_layer;
  Tanh tanh_layer;
  Embedding table(context, 10, 4);
  Lstm rnn(context, 2, 3);
  ReLU relu_layer;
  ReLU6 relu6_layer;
  GELU gelu_layer;
  Flatten flatten_layer;
  MaxPool2d max_pool(Window{.kernel = {2, 2}, .stride = {2, 2}});
  AvgPool2d average_pool(Window{.kernel = {2, 2}, .stride = {2, 2}});
  AdaptiveAvgPool2d adaptive_pool(2, 2);
  Dropout drop(0.5, 0);
  const std::vector<Module*> all = {layer.get(),    &conv,       &batch_norm,    &layer_norm, &rnn,
                                    &relu_layer,    &gelu_layer, &flatten_layer, &max_pool,   &average_pool,
                                    &adaptive_pool, &drop,       &rms_norm,      &group_norm, &conv1d,
                                    &transposed,    &silu_layer, &sigmoid_layer, &tanh_layer, &relu6_layer};
  tape.set_dropout_state(backend->empty({3}, DType::kI64));
  std::vector<DType> refused = {DType::kI32, DType::kF64, DType::kU8, DType::kF16};
  if (!backend->computes_in(DType::kBF16)) refused.push_back(DType::kBF16);
  for (const DType dtype : refused)
    for (Module* module : all)
      EXPECT_THAT(refusal_of([&] {
                    module->forward(tape, tape.input(of_type({2, 4, 4, 2}, dtype)));
                  }),
                  AllOf(HasSubstr(name_of(dtype)), Not(HasSubstr("no UsageError"))))
          << module->type_name() << " of " << name_of(dtype);
  EXPECT_REFUSED("activations of f16 on cpu", tape.set_activations(DType::kF16));
  EXPECT_REFUSED("it takes numbers, i32", table.forward(tape, tape.input(x)));
  EXPECT_REFUSED("no extent is 0", adaptive_pool.forward(tape, tape.input(backend->empty({2, 0, 3, 4}))));
  EXPECT_REFUSED("to 0 x 2", adaptive_avg_pool2d(tape, tape.input(backend->zeros({2, 3, 3, 4})), 0, 2));
  const Tensor vector = backend->zeros({7});
  for (Module* module : std::vector<Module*>{layer.get(), &conv, &batch_norm, &layer_norm, &rnn, &flatten_layer,
                                             &max_pool, &average_pool, &rms_norm, &group_norm, &conv1d, &transposed})
    EXPECT_REFUSED("[7]", module->forward(tape, tape.input(vector))) << module->type_name();
  EXPECT_REFUSED("add of [5, 4] and [7]", add(tape, tape.input(x), tape.input(vector)));
  EXPECT_REFUSED("GELU", conv.forward(tape, tape.input(backend->zeros({1, 4, 4, 2})), Epilogue::kGelu));
  EXPECT_REFUSED("a ReLU6 inside of a fully connected layer", layer->forward(tape, tape.input(x), Epilogue::kRelu6));
  EXPECT_REFUSED("a ReLU6 between a convolution and its pooling",
                 conv.forward(tape, tape.input(backend->zeros({1, 4, 4, 2})), Epilogue::kRelu6, max_pool.window()));
  std::vector<RnnState> states(2);
  EXPECT_REFUSED("2 states for an LSTM of 1 layers", rnn.forward(tape, tape.input(backend->zeros({2, 4, 2})), states));
}

// Adds a vector, which fits nothing.
class AddsAVector final : public Module {
 public:
  explicit AddsAVector(Context& context) : backend_(context.backend) {}
  Var forward(Tape& tape, Var x) override { return add(tape, x, tape.input(backend_.zeros({7}))); }

 private:
  Backend& backend_;
};

TEST_F(Misuse, ErrorsNameTheLayersPath) {
  const auto model = [&](std::unique_ptr<Module> last) {
    auto inside = std::make_unique<Sequential>();
    inside->then(linear_layer()).then(std::move(last));
    auto outside = std::make_unique<Sequential>();
    outside->then(std::make_unique<ReLU>()).then(std::move(inside));
    return outside;
  };
  const auto error_of = [&](std::unique_ptr<Module> last) {
    const auto made = model(std::move(last));
    return refusal_of([&] { (*made)(tape, tape.input(x)); });
  };
  EXPECT_THAT(error_of(linear_layer()), HasSubstr("1.1: Linear with a weight of [3, 4] was given [5, 3]"));
  EXPECT_THAT(error_of(std::make_unique<Conv2d>(context, 3, 2, Window{.kernel = {1, 1}})),
              HasSubstr("1.1: Conv2d with a weight of [2, 1, 1, 3] was given [5, 3]"));
  EXPECT_THAT(error_of(std::make_unique<BatchNorm>(context, 2)), HasSubstr("1.1: BatchNorm over 2 channels was given"));
  EXPECT_THAT(error_of(std::make_unique<LayerNorm>(context, 2)), HasSubstr("1.1: LayerNorm over 2 features was given"));
  EXPECT_THAT(error_of(std::make_unique<Lstm>(context, 3, 2)),
              HasSubstr("1.1: an LSTM with weights [8, 3] and [8, 2] was given [5, 3]"));
  EXPECT_THAT(error_of(std::make_unique<MaxPool2d>(Window{.kernel = {2, 2}})),
              HasSubstr("1.1: pooling was given [5, 3]"));
  EXPECT_THAT(error_of(std::make_unique<AddsAVector>(context)), HasSubstr("1.1: add of [5, 3] and [7]"));
  // A module that nobody has registered has no path, and one that is borrowed begins one.
  EXPECT_THAT(refusal_of([&] {
                layer->forward(tape, tape.input(backend->zeros({2, 2})));
              }),
              ::testing::StartsWith("Linear with a weight of"));
  const auto kept = model(linear_layer());
  EXPECT_EQ(kept->named_modules().back().second->path(), "1.1");
}

TEST_F(Misuse, ArgumentsOfLosses) {
  const auto logits = [&] { return layer->forward(tape, tape.input(x)); };
  const Tensor labels = of_type({5}, DType::kI32);
  std::ranges::fill(labels.span<std::int32_t>(), 0);
  EXPECT_REFUSED("where i32 is wanted", cross_entropy(tape, logits(), x, 1.0f));
  EXPECT_REFUSED("holds nothing", cross_entropy(tape, logits(), Tensor(), 1.0f));
  EXPECT_REFUSED("i64", cross_entropy(tape, logits(), of_type({5}, DType::kI64), 1.0f));
  EXPECT_REFUSED("[4]", cross_entropy(tape, logits(), of_type({4}, DType::kI32), 1.0f));
  for (const float scale : {1.0f / 0.0f, -1.0f / 0.0f, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_REFUSED("a loss scaled by", cross_entropy(tape, logits(), labels, scale));
  for (const float smoothing : {-0.1f, 1.0f, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_REFUSED("smoothed by", cross_entropy(tape, logits(), labels, 1.0f, smoothing));
  EXPECT_REFUSED("over no classes", cross_entropy(tape, tape.input(backend->empty({5, 0})), labels, 1.0f));
  for (const std::int32_t label : {-1, 3, std::numeric_limits<std::int32_t>::max()}) {
    labels.span<std::int32_t>()[4] = label;
    EXPECT_REFUSED(fmt::format("label {} of sample 4", label), cross_entropy(tape, logits(), labels, 1.0f));
  }
  EXPECT_REFUSED("where f32 is wanted", squared_error(tape, logits(), labels, 1.0f));
  EXPECT_REFUSED("both have one shape", squared_error(tape, logits(), x, 1.0f));
}

TEST_F(Misuse, InvalidSlicesAndTypesOfTensors) {
  EXPECT_REFUSED("f32 [5, 4] read as i32", x.data<std::int32_t>());
  EXPECT_REFUSED("[3, 7]", x.reshaped({3, 7}));
  EXPECT_REFUSED("rows 2 to 6 of [5, 4]", x.slice(2, 6));
  EXPECT_REFUSED("holds nothing", Tensor().f32());
  EXPECT_REFUSED("7 axes", Shape{1, 1, 1, 1, 1, 1, 1});
  EXPECT_REFUSED("i32 as f32", values_of(*backend, of_type({2}, DType::kI32)));
  const std::vector<float> two = {1, 2};
  EXPECT_REFUSED("2 values", nn::tensor_of(*backend, {3}, two));
  EXPECT_REFUSED("[2]", copy_to(*backend, x, backend->zeros({2}), *backend));
}

// Backends.

TEST_F(Misuse, ATapeOnAnotherBackend) {
  const auto other = make_cpu_backend(1);
  Tape elsewhere(*other);
  EXPECT_REFUSED("another one", layer->forward(elsewhere, elsewhere.input(x)));
  elsewhere.set_recording(false);  // on the same device, to read them is right: that is what streams do
  EXPECT_NO_THROW(layer->forward(elsewhere, elsewhere.input(x)));
}

TEST_F(Misuse, HostMemoryThatEndsAfterItsTensorWasMade) {
  auto values = std::make_unique<std::vector<float>>(std::vector<float>{1, 2, 3, 4});
  const Tensor copy = backend->from_host(values->data(), {2, 2}, DType::kF32);
  values->assign(4, 0.0f);
  values.reset();
  EXPECT_THAT(values_of(*backend, copy), ElementsAre(1, 2, 3, 4));
}

TEST_F(Misuse, TensorsOutliveTheirBackend) {
  Tensor kept, shared;
  {
    const auto other = make_cpu_backend(1);
    kept = other->zeros({3});
    shared = kept;
    const Tensor another = other->empty({100'000});
  }
  kept.f32()[1] = 2.0f;
  EXPECT_EQ(shared.f32()[1], 2.0f);
  EXPECT_EQ(kept.device()->kind, DeviceKind::kCpu);
}

TEST_F(Misuse, UndefinedTensors) {
  const Tensor nothing, scalar = backend->zeros({});
  std::vector<std::byte> bytes(4);
  const char* const refused = "that holds nothing";
  EXPECT_REFUSED(refused, backend->upload(bytes, nothing));
  EXPECT_REFUSED(refused, backend->download(nothing, bytes));
  EXPECT_REFUSED(refused, backend->write(bytes, nothing));
  EXPECT_REFUSED(refused, backend->make_async_download(4)->begin(nothing));
  EXPECT_REFUSED(refused, copy_to(*backend, nothing, scalar, *backend));
  EXPECT_REFUSED(refused, copy_to(*backend, scalar, nothing, *backend));
  Tensor moved_from = backend->zeros({3, 2});
  const Tensor there = std::move(moved_from);
  EXPECT_FALSE(moved_from.slice(1, 2).defined());  // NOLINT(bugprone-use-after-move)
  EXPECT_REFUSED(refused, moved_from.slice(1, 2).f32());
}

TEST_F(Misuse, BiasesThatDoNotFitTheirWeight) {
  const auto parameter = [&](Shape shape) { return std::make_unique<Parameter>(*backend, shape); };
  const auto w = parameter({3, 4}), b = parameter({1}), kernel = parameter({3, 1, 1, 4}), gamma = parameter({4});
  const auto w_hh = parameter({3, 3}), fits = parameter({3});
  const Tensor mean = backend->zeros({4}), short_mean = backend->zeros({3});
  EXPECT_REFUSED("Linear with a bias of [1] where [3] belongs", linear(tape, tape.input(x), *w, b.get()));
  EXPECT_REFUSED("Conv2d with a bias of [1] where [3] belongs",
                 conv2d(tape, tape.input(backend->zeros({1, 2, 2, 4})), *kernel, b.get(), {}));
  EXPECT_REFUSED("LayerNorm with a bias of [1] where [4] belongs",
                 layer_norm(tape, tape.input(x), *gamma, b.get(), 1e-5));
  EXPECT_REFUSED("BatchNorm with a bias of [1] where [4] belongs",
                 batch_norm(tape, tape.input(x), *gamma, *b, {mean, mean}, true));
  EXPECT_REFUSED("running statistics of [3] where [4] belongs",
                 batch_norm(tape, tape.input(x), *gamma, *gamma, {short_mean, mean}, true));
  EXPECT_REFUSED("with a bias of [1] where [3] belongs",
                 rnn(tape, tape.input(backend->zeros({1, 2, 4})), {*w, *w_hh, fits.get(), b.get()},
                     {.cell = RnnCell::kRelu}, nullptr));
}

TEST_F(Misuse, FactoriesThatBuildNothing) {
  EXPECT_REFUSED("no factory", build_from(context, nullptr));
  EXPECT_THAT(refusal_of([&] { build_from(context, [](Context&) { return std::unique_ptr<Module>(); }); }),
              HasSubstr("builds nothing"));
}

// Files.

TEST_F(Misuse, EntriesOfOtherSizes) {
  auto state = state_of(*layer);
  state.front().bytes.resize(4);
  const float before = layer->named_parameters().front().parameter->value().f32()[0];
  EXPECT_REFUSED("a file does not fit: weight has 4 bytes, not 48", load_entries(entries_of(*layer), state, "a file"));
  EXPECT_EQ(layer->named_parameters().front().parameter->value().f32()[0], before);
  EXPECT_REFUSED("another number of bytes", entries_of(*layer).front().in_file_order(state.front().bytes));
  Parameter& weight = *layer->named_parameters().front().parameter;
  const auto version = weight.version();
  load_entries(entries_of(*layer), state_of(*layer), "a file");
  EXPECT_NE(weight.version(), version);  // copies of it are made again
}

// Optimizers.

TEST_F(Misuse, AScalerThatEndsBeforeItsOptimizer) {
  const auto optimizer = make_sgd(layer->named_parameters(), {});
  {
    GradScaler scaler(*backend);
    optimizer->set_scaler(&scaler);
  }
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  EXPECT_REFUSED("whose GradScaler is gone", optimizer->step(0.1));
}

TEST_F(Misuse, AStepIsRefusedBeforeAnythingHasMoved) {
  const auto optimizer = make_adamw(layer->named_parameters(), {});
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  const auto parameters = layer->named_parameters();
  parameters.back().parameter->mark_partial();
  const float before = parameters.front().parameter->value().f32()[0];
  EXPECT_REFUSED("this rank's alone", optimizer->step(0.1));
  EXPECT_EQ(optimizer->steps(), 0);
  EXPECT_EQ(parameters.front().parameter->value().f32()[0], before);
}

TEST_F(Misuse, AnAverageThatOutlivesItsModuleOrHasNone) {
  MovingAverage average(layer->named_parameters(), 0.9);
  layer.reset();
  const auto gone = HasSubstr("a moving average's parameter weight is no longer there");
  EXPECT_THAT(refusal_of([&] { average.update(); }), gone);
  EXPECT_THAT(refusal_of([&] { const auto in_place = average.in_place(); }), gone);
  EXPECT_THAT(refusal_of([&] { average.values(); }), gone);
  const auto other = linear_layer();
  auto twice = other->named_parameters();
  twice.push_back(twice.front());
  EXPECT_REFUSED("a moving average was given weight twice", MovingAverage(twice, 0.9));
  EXPECT_REFUSED("which is no parameter", MovingAverage({{"w", nullptr}}, 0.9));
}

TEST_F(Misuse, AStepWithoutBackward) {
  const auto optimizer = make_adamw(layer->named_parameters(), {});
  const auto step = [&] { optimizer->step(0.1); };
  const char* const refused = "none of its parameters has a gradient";
  EXPECT_REFUSED(refused, step());
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  optimizer->zero_grad();  // in the wrong place
  EXPECT_REFUSED(refused, step());
  EXPECT_EQ(optimizer->steps(), 0);  // it has not counted
}

TEST_F(Misuse, ParametersOfAnotherModel) {
  const auto other = linear_layer();
  const auto optimizer = make_sgd(other->named_parameters(), {});
  tape.backward(loss_of(layer->forward(tape, tape.input(x))).value);
  EXPECT_REFUSED("a loss that depends on them", optimizer->step(0.1));
}

TEST_F(Misuse, ParametersThatCannotGoTogether) {
  auto twice = layer->named_parameters();
  twice.push_back(twice.front());
  EXPECT_REFUSED("weight twice", make_sgd(twice, {}));
  EXPECT_REFUSED("no parameter", make_adamw({{"w", nullptr}}, {}));
  const auto other = make_cpu_backend(1);
  Context there{*other, generator};
  const Linear foreign(there, 4, 3);
  auto both = layer->named_parameters();
  both.push_back(foreign.named_parameters().front());
  EXPECT_REFUSED("of two backends", make_sgd(both, {}));
}

}  // namespace
}  // namespace lockstep::nn
