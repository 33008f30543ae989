// Segments that backward recomputes: the same bits as without, in less memory.
#include "lockstep/nn/autograd/functions.h"

#include <gmock/gmock.h>

#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/models/models.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct Result {
  float loss = 0;
  std::vector<std::vector<float>> gradients, statistics;
  std::size_t peak_bytes = 0;
};

/// Two passes over `model`; its first `recomputed` blocks are recomputed.
Result train(const ModelSpec& spec, const Shape& shape, std::size_t recomputed) {
  const auto backend = make_cpu_backend(1);
  Generator generator(1);
  Context context{*backend, generator};
  const auto model = make_model(context, spec);
  const auto blocks = model->blocks();
  EXPECT_GE(blocks.size(), recomputed);
  for (std::size_t i = 0; i < recomputed; ++i) blocks[i]->set_recomputed(true);
  const bool each_token = shape.size() == 2 && spec.vocabulary == 0;  // else a class of each sample
  Tensor x;
  if (shape.size() == 2) {
    std::vector<std::int32_t> values;
    for (std::int64_t i = 0; i < shape.count(); ++i) values.push_back(static_cast<std::int32_t>(i * 7 % spec.classes));
    x = backend->empty(shape, DType::kI32);
    backend->upload(std::as_bytes(std::span(values)), x);
  } else {
    x = random_tensor(*backend, shape, 3);
  }
  const std::int64_t targets = each_token ? shape.count() : shape[0];
  std::vector<std::int32_t> labels;
  for (std::int64_t i = 0; i < targets; ++i) labels.push_back(static_cast<std::int32_t>(i % spec.classes));
  const Tensor wanted = backend->empty(each_token ? shape : Shape{targets}, DType::kI32);
  backend->upload(std::as_bytes(std::span(labels)), wanted);

  Tape tape(*backend);
  const DropoutState dropout = {.seed = 5, .step = 2, .first_sample = 0};
  const Tensor state = backend->empty({3}, DType::kI64);
  backend->write(std::as_bytes(std::span(&dropout, 1)), state);
  tape.set_dropout_state(state);
  Result result;
  for (int pass = 0; pass < 2; ++pass) {
    for (const auto& [name, parameter] : model->named_parameters()) parameter->clear_grad();
    const std::size_t before = backend->allocator().stats().bytes_asked;
    const Loss loss = cross_entropy(tape, model->forward(tape, tape.input(x)), wanted, 0.25f);
    result.loss = values_of(loss.totals())[0];
    tape.backward(loss.value);
    tape.reset();
    result.peak_bytes = backend->allocator().stats().peak_bytes_asked - before;
  }
  for (const auto& [name, parameter] : model->named_parameters()) {
    EXPECT_TRUE(parameter->has_gradient()) << name;
    EXPECT_FALSE(parameter->awaits_backward()) << name;
    result.gradients.push_back(values_of(parameter->gradient()));
  }
  for (const auto& buffer : model->named_buffers())
    if (buffer.tensor->dtype() == DType::kF32)
      result.statistics.push_back(values_of(*buffer.tensor));
    else
      result.statistics.push_back({static_cast<float>(*buffer.tensor->data<std::int64_t>())});
  return result;
}

void expect_the_same(const ModelSpec& spec, const Shape& shape, std::size_t blocks) {
  const Result whole = train(spec, shape, 0);
  for (const std::size_t recomputed : {std::size_t{1}, blocks}) {
    SCOPED_TRACE(fmt::format("{}, {} of {} blocks", spec.name, recomputed, blocks));
    const Result again = train(spec, shape, recomputed);
    EXPECT_EQ(again.loss, whole.loss);
    EXPECT_EQ(again.gradients, whole.gradients);
    EXPECT_EQ(again.statistics, whole.statistics);
    EXPECT_LT(again.peak_bytes, whole.peak_bytes);
  }
}

TEST(Recompute, ABlocksBitsAreTheSame) {
  expect_the_same({.name = "gpt",
                   .sample_shape = {16},
                   .classes = 50,
                   .settings = {{"layers", 6}, {"heads", 2}, {"width", 32}, {"context", 16}, {"dropout", 0.25}}},
                  {4, 16}, 6);
  expect_the_same({.name = "llama",
                   .sample_shape = {16},
                   .classes = 50,
                   .settings = {{"layers", 6}, {"heads", 4}, {"width", 32}, {"context", 16}}},
                  {4, 16}, 6);
  expect_the_same({.name = "bert",
                   .sample_shape = {16},
                   .classes = 3,
                   .settings = {{"layers", 5}, {"heads", 2}, {"width", 32}, {"max-length", 16}, {"dropout", 0.25}},
                   .vocabulary = 40},
                  {4, 16}, 5);
  expect_the_same({.name = "vit",
                   .sample_shape = {8, 8, 3},
                   .settings = {{"layers", 6}, {"heads", 2}, {"width", 32}, {"patch", 2}, {"dropout", 0.25}}},
                  {4, 8, 8, 3}, 6);
  expect_the_same({.name = "resnet18-cifar", .sample_shape = {8, 8, 3}}, {2, 8, 8, 3}, 8);
}

class RecomputeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
  Tensor x = random_tensor(*backend, {3, 4}, 1), target = random_tensor(*backend, {3, 4}, 2);
  Tape tape{*backend};
  Loss loss_of(Var y) { return squared_error(tape, y, target, 0.5f); }
};

TEST_F(RecomputeTest, SegmentsInSegments) {
  Linear first(context, 4, 4), second(context, 4, 4);
  const auto inner = [&](Tape& on, const Vars& in) -> Vars { return relu(on, second.forward(on, in)); };
  int runs = 0;
  const auto outer = [&](Tape& on, const Vars& in) -> Vars {
    ++runs;
    return recompute(on, recompute(on, first.forward(on, in), inner), inner);
  };
  const auto run = [&](bool again) {
    for (Linear* layer : {&first, &second})
      for (const auto& [name, parameter] : layer->named_parameters()) parameter->clear_grad();
    const Var in = tape.differentiable_input(x);
    const Var y = again ? Var(recompute(tape, in, outer)) : Var(outer(tape, in));
    tape.backward(loss_of(y).value);
    std::vector<std::vector<float>> all = {values_of(tape.grad(in))};
    for (Linear* layer : {&first, &second})
      for (const auto& [name, parameter] : layer->named_parameters()) all.push_back(values_of(parameter->gradient()));
    tape.reset();
    return all;
  };
  const auto plain = run(false);
  EXPECT_EQ(run(true), plain);
  EXPECT_EQ(runs, 3);
}

// A parameter of two segments, and of what follows: it is ready once, after the last of them.
TEST_F(RecomputeTest, AParameterIsReadyOnce) {
  Linear layer(context, 4, 4);
  int ready = 0, segments = 0;
  layer.named_parameters()[0].parameter->on_ready = [&] {
    ++ready;
    EXPECT_EQ(segments, 4);
  };
  const Segment segment = [&](Tape& on, const Vars& in) -> Vars {
    ++segments;
    return layer.forward(on, in);
  };
  const Var y = layer.forward(tape, Var(recompute(tape, Var(recompute(tape, tape.input(x), segment)), segment)));
  EXPECT_EQ(segments, 2);
  EXPECT_TRUE(layer.named_parameters()[0].parameter->awaits_backward());
  tape.backward(loss_of(y).value);
  EXPECT_EQ(ready, 1);
  tape.reset();
  // Nor does a pass that is given up leave anything.
  recompute(tape, tape.input(x), segment);
  tape.reset();
  EXPECT_FALSE(layer.named_parameters()[0].parameter->awaits_backward());
}

// Results that are inputs, and some that nobody uses.
TEST_F(RecomputeTest, SeveralResults) {
  Linear layer(context, 4, 4);
  const Segment segment = [&](Tape& on, const Vars& in) -> Vars {
    const Var y = layer.forward(on, in[0]);
    return {y, in[0], relu(on, y)};
  };
  const auto run = [&](bool again) {
    for (const auto& [name, parameter] : layer.named_parameters()) parameter->clear_grad();
    const Var in = tape.differentiable_input(x);
    const Vars made = again ? recompute(tape, in, segment) : segment(tape, in);
    tape.backward(loss_of(add(tape, made[0], made[1])).value);
    std::vector<std::vector<float>> all = {values_of(tape.grad(in))};
    for (const auto& [name, parameter] : layer.named_parameters()) all.push_back(values_of(parameter->gradient()));
    tape.reset();
    return all;
  };
  const auto plain = run(false);
  EXPECT_EQ(run(true), plain);
}

TEST_F(RecomputeTest, Mistakes) {
  Linear layer(context, 4, 4);
  Var inside;
  int runs = 0;
  const Segment segment = [&](Tape& on, const Vars& in) -> Vars {
    inside = layer.forward(on, in);
    const Var y = relu(on, inside);
    return ++runs % 2 == 0 ? Vars{y, y} : Vars{y};
  };
  const Var y = recompute(tape, tape.input(x), segment);
  EXPECT_REFUSED("the value of a Var after backward", inside.value());
  const Loss loss = loss_of(y);
  EXPECT_REFUSED("returns another number of values", tape.backward(loss.value));
  tape.reset();
  EXPECT_FALSE(layer.named_parameters()[0].parameter->awaits_backward());
  // Without recording nothing is kept, and the segment runs once.
  tape.set_recording(false);
  runs = 0;
  recompute(tape, tape.input(x), segment);
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace lockstep::nn
