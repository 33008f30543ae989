#include "lockstep/nn/layers/layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/nn/models/models.h"
#include "tests/nn/values.h"
#include "tests/support/models.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names_of(const Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : module.named_parameters())
    names.push_back(name + " " + to_string(parameter->value().shape()));
  return names;
}

// The tape outlives the modules that the tests make, so it only records where a test asks for gradients.
class Layers : public ::testing::Test {
 protected:
  Layers() { tape.set_recording(false); }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
  Tape tape{*backend};
};

TEST_F(Layers, InitialisationsAreUniformAndBounded) {
  const Linear linear(context, 300, 200);
  const Conv2d conv(context, 20, 100, {{3, 5}, {1, 1}, {0, 0}});
  const auto check = [](const Tensor& values, double bound) {
    const auto n = static_cast<double>(values.count());
    double sum = 0, squares = 0, largest = 0;
    for (const float v : values.span<float>()) {
      sum += static_cast<double>(v);
      squares += static_cast<double>(v) * static_cast<double>(v);
      largest = std::max(largest, std::abs(static_cast<double>(v)));
    }
    EXPECT_LE(largest, bound * (1 + 1e-7));
    EXPECT_GE(largest, bound * (1 - 20 / n));
    // Mean 0 and variance bound² / 3, each within five standard deviations; the seed is fixed.
    EXPECT_LT(std::abs(sum / n), 5 * bound / std::sqrt(3 * n));
    EXPECT_LT(std::abs(squares / n - bound * bound / 3), 5 * bound * bound * std::sqrt(4.0 / 45 / n));
  };
  for (const auto& [name, parameter] : linear.named_parameters()) check(parameter->value(), 1 / std::sqrt(300.0));
  for (const auto& [name, parameter] : conv.named_parameters()) check(parameter->value(), 1 / std::sqrt(300.0));
}

TEST_F(Layers, InitialisationsDependOnTheSeedAlone) {
  const auto first_weights = [](std::uint64_t seed, int threads) {
    const auto other_backend = make_cpu_backend(threads);
    Generator other_generator(seed);
    Context other{*other_backend, other_generator};
    const auto model = make_model(other, {.name = "cnn", .sample_shape = {8, 8, 1}});
    std::vector<float> all;
    for (const auto& [name, parameter] : model->named_parameters())
      for (const float v : parameter->value().span<float>()) all.push_back(v);
    return all;
  };
  const auto base = first_weights(1, 1);
  EXPECT_EQ(base, first_weights(1, 2));
  const auto other = first_weights(2, 1);
  std::size_t same = 0;
  for (std::size_t i = 0; i < base.size(); ++i) same += base[i] == other[i];
  EXPECT_LT(same, base.size() / 1000);
}

// A change of these numbers changes every run that anybody wants to repeat.
TEST_F(Layers, InitialBitsNeverChange) {
  const Tensor t = backend->empty({4});
  Generator(1).uniform(t.span<float>(), -1.0, 1.0);
  EXPECT_THAT(values_of(t), ElementsAre(0.49949649f, -0.255213141f, -0.123432189f, 0.908233404f));
}

TEST_F(Layers, NamesAndOrderArePyTorchs) {
  EXPECT_THAT(names_of(*make_model(context, {.name = "linear", .sample_shape = {5}, .classes = 2})),
              ElementsAre("fc.weight [2, 5]", "fc.bias [2]"));
  EXPECT_THAT(
      names_of(*make_model(context, {.name = "mlp", .sample_shape = {28, 28, 1}, .settings = {{"hidden", {7, 9}}}})),
      ElementsAre("fc1.weight [7, 784]", "fc1.bias [7]", "fc2.weight [9, 7]", "fc2.bias [9]", "fc3.weight [10, 9]",
                  "fc3.bias [10]"));
  EXPECT_THAT(
      names_of(*make_model(
          context,
          {.name = "mlp", .sample_shape = {3}, .classes = 2, .settings = {{"hidden", std::vector<std::int64_t>()}}})),
      ElementsAre("fc1.weight [2, 3]", "fc1.bias [2]"));
  EXPECT_THAT(
      names_of(*make_model(context, {.name = "cnn", .sample_shape = {9, 7, 3}})),
      ElementsAre("conv1.weight [32, 3, 3, 3]", "conv1.bias [32]", "conv2.weight [64, 3, 3, 32]", "conv2.bias [64]",
                  "fc1.weight [128, 128]", "fc1.bias [128]", "fc2.weight [10, 128]", "fc2.bias [10]"));
  Sequential model;
  model.then(std::make_unique<Conv2d>(context, 1, 2, Window{}, false))
      .then(std::make_unique<BatchNorm>(context, 2))
      .then(std::make_unique<ReLU>())
      .then(std::make_unique<Linear>(context, 2, 3, false));
  EXPECT_THAT(names_of(model), ElementsAre("0.weight [2, 1, 1, 1]", "1.weight [2]", "1.bias [2]", "3.weight [3, 2]"));
  std::vector<std::string> buffers;
  for (const auto& buffer : model.named_buffers())
    buffers.push_back(buffer.name + " " + to_string(buffer.tensor->shape()));
  EXPECT_THAT(buffers, ElementsAre("1.running_mean [2]", "1.running_var [2]", "1.num_batches_tracked []"));
}

// torchvision's zero_init_residual: of each block's normalisations the last one, not that of the way past it.
TEST_F(Layers, ResidualBlocksMayStartAsTheIdentity) {
  struct Residual {
    const char* model;
    const char* last;
    int blocks, norms;
  };
  Generator zeros = Generator::zeros();  // convolutions' weights take seconds to draw
  Context undrawn{*backend, zeros};
  for (const auto& [name, last, blocks, norms] :
       {Residual{"resnet18", ".bn2.weight", 8, 20}, Residual{"resnet34", ".bn2.weight", 16, 36},
        Residual{"resnet50", ".bn3.weight", 16, 53}, Residual{"resnet101", ".bn3.weight", 33, 104}})
    for (const bool zero : {true, false}) {
      SCOPED_TRACE(name);
      const auto model = make_model(
          undrawn,
          {.name = name, .sample_shape = {32, 32, 3}, .classes = 2, .settings = {{"zero-init-residual", zero}}});
      int at_zero = 0, at_one = 0;
      for (const auto& [key, parameter] : model->named_parameters()) {
        if (parameter->value().shape().size() != 1 || !key.ends_with("weight")) continue;
        const bool ends_a_block = key.starts_with("layer") && key.ends_with(last);
        const float expected = zero && ends_a_block ? 0.0f : 1.0f;
        for (const float value : parameter->value().span<float>()) ASSERT_EQ(value, expected) << key;
        ++(expected == 0.0f ? at_zero : at_one);
      }
      EXPECT_EQ(at_zero, zero ? blocks : 0);
      EXPECT_EQ(at_one, zero ? norms - blocks : norms);
    }
}

TEST_F(Layers, ModelsTakeTheirSamples) {
  for (const auto& [name, shape] : {std::pair<std::string, std::vector<std::int64_t>>{"linear", {5}},
                                    {"linear", {3, 2, 4}},
                                    {"mlp", {8, 8, 1}},
                                    {"cnn", {8, 8, 1}},
                                    {"cnn", {4, 7, 3}}}) {
    const auto model = make_model(context, {.name = name,
                                            .sample_shape = shape,
                                            .classes = 3,
                                            .settings = lockstep::testing::settings_of(name, {{"hidden", {6}}})});
    for (const std::int64_t n : {0, 1, 5}) {
      std::vector<std::int64_t> dims = {n};
      dims.insert(dims.end(), shape.begin(), shape.end());
      const Tensor x = random_tensor(*backend, Shape(std::span<const std::int64_t>(dims)), 1);
      EXPECT_EQ(model->forward(tape, tape.input(x)).shape(), (Shape{n, 3})) << name;
      tape.reset();
    }
  }
}

TEST_F(Layers, ModelsThatCannotBe) {
  const auto message = [&](const ModelSpec& spec) -> std::string {
    try {
      make_model(context, spec);
    } catch (const UsageError& error) {
      return error.line();
    }
    return "no UsageError";
  };
  EXPECT_THAT(message({.name = "cn", .sample_shape = {8, 8, 1}}), HasSubstr("did you mean 'cnn'?"));
  EXPECT_THAT(message({.name = "zzzzzzzzzz", .sample_shape = {8, 8, 1}}), HasSubstr("linear, mlp, tabular, cnn"));
  EXPECT_THAT(message({.name = "cnn", .sample_shape = {5}}), HasSubstr("at least 4x4"));
  EXPECT_THAT(message({.name = "cnn", .sample_shape = {8, 3, 1}}), HasSubstr("at least 4x4"));
  EXPECT_THAT(message({.name = "mlp", .sample_shape = {5}, .classes = 0}), HasSubstr("at least 1"));
  EXPECT_THAT(message({.name = "mlp", .sample_shape = {0}}), HasSubstr("at least 1"));
  EXPECT_THAT(message({.name = "mlp", .sample_shape = {5}, .settings = {{"hidden", {5, -1}}}}), HasSubstr("-1 is out"));
  EXPECT_THAT(message({.name = "mlp", .sample_shape = {1 << 30, 1 << 20}, .settings = {{"hidden", {1 << 24}}}}),
              HasSubstr("no size that memory can have"));
}

TEST_F(Layers, FlattenPutsChannelsOutermost) {
  const Tensor x = backend->empty({2, 2, 3, 2});
  for (std::int64_t i = 0; i < x.count(); ++i) x.f32()[i] = static_cast<float>(i);
  const Tensor y = flatten(tape, tape.input(x)).value();
  EXPECT_EQ(y.shape(), (Shape{2, 12}));
  EXPECT_THAT(values_of(y), ElementsAre(0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11,  //
                                        12, 14, 16, 18, 20, 22, 13, 15, 17, 19, 21, 23));
  const Tensor column = random_tensor(*backend, {2, 3, 2, 1}, 1), pixel = random_tensor(*backend, {2, 1, 1, 6}, 1);
  EXPECT_EQ(values_of(flatten(tape, tape.input(column)).value()), values_of(column));
  EXPECT_EQ(values_of(flatten(tape, tape.input(pixel)).value()), values_of(pixel));
}

TEST_F(Layers, SequentialFusesReluWithTheSameNumbers) {
  const Window same = {{3, 3}, {1, 1}, {1, 1}};
  Sequential fused;
  auto conv = std::make_unique<Conv2d>(context, 2, 5, same);
  auto fc = std::make_unique<Linear>(context, 5 * 16, 7);
  auto last = std::make_unique<Linear>(context, 7, 3);
  Conv2d& c = *conv;
  Linear &f = *fc, &l = *last;
  fused.then(std::move(conv)).then(std::make_unique<ReLU>()).then(std::make_unique<Flatten>());
  fused.then(std::move(fc)).then(std::make_unique<ReLU>()).then(std::make_unique<ReLU>()).then(std::move(last));
  const Tensor x = random_tensor(*backend, {3, 4, 4, 2}, 1), target = random_tensor(*backend, {3, 3}, 2);
  tape.set_recording(true);
  int nodes = 0;
  tape.set_node_hook([&] { ++nodes; });
  const auto run = [&](const std::function<Var(Var)>& forward) {
    nodes = 0;
    std::vector<float> all;
    for (const auto& [name, parameter] : fused.named_parameters()) parameter->clear_grad();
    const Loss loss = squared_error(tape, forward(tape.input(x)), target, 1.0f);
    tape.backward(loss.value);
    all.push_back(loss.totals().f32()[0]);
    for (const auto& [name, parameter] : fused.named_parameters())
      for (const float g : parameter->gradient().span<float>()) all.push_back(g);
    tape.reset();
    return all;
  };
  const auto together = run([&](Var v) { return fused.forward(tape, v); });
  EXPECT_EQ(nodes, 6);  // conv, flatten, fc, the second relu, last, loss
  const auto apart = run([&](Var v) {
    v = flatten(tape, relu(tape, c.forward(tape, v)));
    return l.forward(tape, relu(tape, relu(tape, f.forward(tape, v))));
  });
  EXPECT_EQ(nodes, 8);
  EXPECT_EQ(together, apart);
}

TEST_F(Layers, SequentialFusesActivationsAfterNormsWithTheSameNumbers) {
  for (const bool six : {false, true}) {
    Sequential fused;
    fused.then(std::make_unique<Conv2d>(context, 4, 6, Window{{3, 3}, {1, 1}, {1, 1}}, false, 2))
        .then(std::make_unique<BatchNorm>(context, 6));
    six ? fused.then(std::make_unique<ReLU6>()) : fused.then(std::make_unique<ReLU>());
    const auto parameters = fused.named_parameters();
    for (float& v : parameters[1].parameter->value().span<float>()) v = 4.0f;  // some are above 6
    const Tensor image = random_tensor(*backend, {3, 5, 4, 4}, 1), target = random_tensor(*backend, {3, 5, 4, 6}, 2);
    tape.set_recording(true);
    int nodes = 0;
    tape.set_node_hook([&] { ++nodes; });
    const auto run = [&](const std::function<Var(Var)>& forward) {
      nodes = 0;
      for (const auto& [name, parameter] : parameters) parameter->clear_grad();
      const Var x = tape.differentiable_input(image), y = forward(x);
      std::vector<float> all = values_of(y.value());
      tape.backward(squared_error(tape, y, target, 0.01f).value);
      const auto dx = values_of(tape.grad(x));
      all.insert(all.end(), dx.begin(), dx.end());
      for (const auto& [name, parameter] : parameters)
        for (const float g : parameter->gradient().span<float>()) all.push_back(g);
      tape.reset();
      return all;
    };
    const auto together = run([&](Var v) { return fused.forward(tape, v); });
    EXPECT_EQ(nodes, 3);  // conv, norm, loss
    EXPECT_EQ(std::ranges::count(together, 6.0f) > 0, six);
    const auto apart = run([&](Var v) {
      for (const auto& [name, part] : fused.named_modules())
        if (part != &fused) v = part->forward(tape, v);
      return v;
    });
    EXPECT_EQ(nodes, 4);
    EXPECT_EQ(together, apart);
  }
}

// Four pieces of forward and backward, the last one smaller, against the three operators one after the other. Results
// and the input's gradient are equal bit for bit; the parameters' gradients are sums in another order.
TEST_F(Layers, SequentialPoolsConvolutionsInPieces) {
  constexpr std::int64_t kSamples = 61, kSide = 16, kChannels = 32;
  ASSERT_LT(backend->cache_block_bytes(), 20 * kSide * kSide * kChannels * sizeof(float)) << "all would be one piece";
  Sequential model;
  auto conv = std::make_unique<Conv2d>(context, 3, kChannels, Window{{3, 3}, {1, 1}, {1, 1}});
  Conv2d& c = *conv;
  const Window window = {{2, 2}, {2, 2}, {0, 0}};
  model.then(std::move(conv)).then(std::make_unique<ReLU>()).then(std::make_unique<MaxPool2d>(window));
  const Tensor target = random_tensor(*backend, {kSamples, kSide / 2, kSide / 2, kChannels}, 2);
  const Tensor image = random_tensor(*backend, {kSamples, kSide, kSide, 3}, 1);
  tape.set_recording(true);
  int nodes = 0;
  tape.set_node_hook([&] { ++nodes; });
  struct Result {
    std::vector<float> y, dx, dw, db;
  };
  const auto run = [&](const std::function<Var(Var)>& forward, bool add) {
    nodes = 0;
    Result result;
    const auto parameters = model.named_parameters();
    for (const auto& [name, parameter] : parameters)
      if (!add) parameter->clear_grad();
    const Var x = tape.differentiable_input(image), y = forward(x);
    result.y = values_of(y.value());
    tape.backward(squared_error(tape, y, target, 0.01f).value);
    result.dx = values_of(tape.grad(x));
    result.dw = values_of(parameters[0].parameter->gradient());
    result.db = values_of(parameters[1].parameter->gradient());
    tape.reset();
    return result;
  };
  const auto fused = [&](Var v) { return model.forward(tape, v); };
  const auto apart = [&](Var v) { return pool2d(tape, PoolKind::kMax, c.forward(tape, v, Epilogue::kRelu), window); };
  const auto expect_near = [](const std::vector<float>& got, const std::vector<float>& wanted) {
    float largest = 0;
    for (const float v : wanted) largest = std::max(largest, std::abs(v));
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 1e-5f * largest) << i;
  };
  const Result once = run(fused, false);
  EXPECT_EQ(nodes, 2);
  const Result twice = run(fused, true);
  const Result three = run(apart, false);
  EXPECT_EQ(nodes, 3);
  EXPECT_EQ(once.y, three.y);
  EXPECT_EQ(once.dx, three.dx);
  expect_near(once.dw, three.dw);
  expect_near(once.db, three.db);
  const auto doubled = [](std::vector<float> values) {
    for (float& v : values) v *= 2;
    return values;
  };
  expect_near(twice.dw, doubled(once.dw));
  expect_near(twice.db, doubled(once.db));
}

TEST_F(Layers, ConvolutionsInGroupsHavePoolingInside) {
  Conv2d conv(context, 4, 6, Window{{3, 3}, {1, 1}, {1, 1}}, true, 2);
  const Window window = {{2, 2}, {2, 2}, {0, 0}};
  const Tensor image = random_tensor(*backend, {3, 6, 4, 4}, 1), target = random_tensor(*backend, {3, 3, 2, 6}, 2);
  tape.set_recording(true);
  const auto run = [&](const std::function<Var(Var)>& forward) {
    std::vector<std::vector<float>> all;
    for (const auto& [name, parameter] : conv.named_parameters()) parameter->clear_grad();
    const Var x = tape.differentiable_input(image), y = forward(x);
    all.push_back(values_of(y.value()));
    tape.backward(squared_error(tape, y, target, 1.0f).value);
    all.push_back(values_of(tape.grad(x)));
    for (const auto& [name, parameter] : conv.named_parameters()) all.push_back(values_of(parameter->gradient()));
    tape.reset();
    return all;
  };
  EXPECT_EQ(run([&](Var v) { return conv.forward(tape, v, Epilogue::kRelu, window); }),
            run([&](Var v) { return pool2d(tape, PoolKind::kMax, conv.forward(tape, v, Epilogue::kRelu), window); }));
}

TEST_F(Layers, LstmTakesSequencesOrBatchesFirst) {
  constexpr std::int64_t kBatch = 3, kSteps = 4, kIn = 5, kHidden = 7;
  Generator one(3), other(3);
  Context one_context{*backend, one}, other_context{*backend, other};
  Lstm batch_first(one_context, kIn, kHidden, {.num_layers = 2});
  Lstm sequence_first(other_context, kIn, kHidden, {.num_layers = 2, .batch_first = false});
  EXPECT_EQ(sequence_first.details(), "5, 7, num_layers=2");  // as PyTorch prints it
  const Tensor x = backend->empty({kBatch, kSteps, kIn}), turned = backend->empty({kSteps, kBatch, kIn});
  generator.uniform(x.span<float>(), -1, 1);
  for (std::int64_t n = 0; n < kBatch; ++n)
    for (std::int64_t t = 0; t < kSteps; ++t)
      std::copy_n(x.f32() + (n * kSteps + t) * kIn, kIn, turned.f32() + (t * kBatch + n) * kIn);
  const Var y = batch_first.forward(tape, tape.input(x));
  const Var z = sequence_first.forward(tape, tape.input(turned));
  ASSERT_EQ(z.shape(), (Shape{kSteps, kBatch, kHidden}));
  for (std::int64_t n = 0; n < kBatch; ++n)
    for (std::int64_t t = 0; t < kSteps; ++t)
      for (std::int64_t h = 0; h < kHidden; ++h)
        EXPECT_EQ(z.value().f32()[(t * kBatch + n) * kHidden + h], y.value().f32()[(n * kSteps + t) * kHidden + h]);
}

TEST_F(Layers, TrainReachesAllChildren) {
  Sequential outer;
  auto inner = std::make_unique<Sequential>();
  auto norm = std::make_unique<BatchNorm>(context, 2);
  const BatchNorm& deep = *norm;
  inner->then(std::move(norm));
  outer.then(std::move(inner));
  EXPECT_TRUE(deep.training());
  outer.train(false);
  EXPECT_FALSE(deep.training());
  outer.train(true);
  EXPECT_TRUE(deep.training());
}

TEST_F(Layers, BatchNormTracksAndEvaluates) {
  BatchNorm norm(context, 2);
  const auto buffers = norm.named_buffers();
  const Tensor &mean = *buffers[0].tensor, &variance = *buffers[1].tensor, &batches = *buffers[2].tensor;
  EXPECT_THAT(values_of(mean), ElementsAre(0, 0));
  EXPECT_THAT(values_of(variance), ElementsAre(1, 1));
  const Var x = tape.input(tensor_of(*backend, {2, 2}, {1.0f, 10.0f, 3.0f, 10.0f}));
  const auto y = values_of(norm.forward(tape, x).value());
  EXPECT_NEAR(y[0], -1.0f, 1e-4f);
  EXPECT_NEAR(y[2], 1.0f, 1e-4f);
  EXPECT_NEAR(y[1], 0.0f, 1e-4f);
  EXPECT_EQ(*batches.data<std::int64_t>(), 1);
  EXPECT_FLOAT_EQ(mean.f32()[0], 0.2f);  // 0.9 · 0 + 0.1 · 2
  EXPECT_FLOAT_EQ(mean.f32()[1], 1.0f);
  EXPECT_FLOAT_EQ(variance.f32()[0], 0.9f + 0.2f);  // unbiased: 2, not 1
  EXPECT_FLOAT_EQ(variance.f32()[1], 0.9f);
  norm.train(false);
  const auto evaluated = values_of(norm.forward(tape, x).value());
  EXPECT_NEAR(evaluated[0], (1.0f - 0.2f) / std::sqrt(1.1f + 1e-5f), 1e-5f);
  EXPECT_NEAR(evaluated[1], (10.0f - 1.0f) / std::sqrt(0.9f + 1e-5f), 1e-4f);
  EXPECT_EQ(*batches.data<std::int64_t>(), 1);
  EXPECT_FLOAT_EQ(mean.f32()[0], 0.2f);
  // A batch that is refused is not counted.
  norm.train(true);
  EXPECT_THROW(norm.forward(tape, tape.input(random_tensor(*backend, {1, 2}, 1))), UsageError);
  EXPECT_EQ(*batches.data<std::int64_t>(), 1);
}

}  // namespace
}  // namespace lockstep::nn
