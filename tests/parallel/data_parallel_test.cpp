// Several devices against one: the same gradients and the same training.
#include "lockstep/parallel/data_parallel.h"

#include <gmock/gmock.h>

#include <mutex>
#include <numeric>

#include "base/error.h"
#include "base/splitmix.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizer.h"
#include "tests/support/models.h"

namespace lockstep::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Shapes = std::vector<std::string>;

constexpr std::int64_t kSide = 8, kClasses = 10;

nn::Tensor random_tensor(nn::Backend& backend, const nn::Shape& shape, std::uint64_t seed) {
  nn::Tensor made = backend.empty(shape);
  for (std::size_t i = 0; i < made.span<float>().size(); ++i)
    made.f32()[i] = static_cast<float>(SplitMix64::word(seed, i) % 2000) / 1000.0f - 1.0f;
  return made;
}

nn::Tensor random_labels(nn::Backend& backend, const nn::Shape& shape, std::uint64_t seed) {
  nn::Tensor made = backend.empty(shape, DType::kI32);
  for (std::size_t i = 0; i < made.span<std::int32_t>().size(); ++i)
    made.data<std::int32_t>()[i] = static_cast<std::int32_t>(SplitMix64::word(seed, i) % kClasses);
  return made;
}

nn::ModelSpec spec_of(const std::string& name) {
  return {.name = name,
          .sample_shape = {kSide, kSide, 1},
          .classes = kClasses,
          .settings = testing::settings_of(name, {{"hidden", {33, 17}}, {"layers", 2}, {"width", 24}})};
}

std::unique_ptr<nn::Module> model_of(const nn::ModelSpec& spec, nn::Backend& backend, std::uint64_t seed = 1) {
  nn::Generator generator(seed);
  nn::Context context{backend, generator};
  return nn::make_model(context, spec);
}

// ‖a − b‖∞ ≤ tolerance · ‖b‖∞: f32 sums in another order.
void expect_close(const nn::Tensor& got, const nn::Tensor& wanted, const std::string& name, float tolerance = 1e-5f) {
  ASSERT_EQ(got.shape(), wanted.shape()) << name;
  float largest = 0, difference = 0;
  for (std::int64_t i = 0; i < got.count(); ++i) {
    largest = std::max(largest, std::abs(wanted.f32()[i]));
    difference = std::max(difference, std::abs(got.f32()[i] - wanted.f32()[i]));
  }
  EXPECT_LE(difference, tolerance * largest) << name;
}

void expect_same_gradients(const nn::Module& got, const nn::Module& wanted, float tolerance = 1e-5f) {
  const auto mine = got.named_parameters(), reference = wanted.named_parameters();
  ASSERT_EQ(mine.size(), reference.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    ASSERT_EQ(mine[i].parameter->has_gradient(), reference[i].parameter->has_gradient()) << mine[i].name;
    if (mine[i].parameter->has_gradient())
      expect_close(mine[i].parameter->gradient(), reference[i].parameter->gradient(), mine[i].name, tolerance);
  }
}

void clear_grads(const nn::Module& module) {
  for (const auto& [name, parameter] : module.named_parameters()) parameter->clear_grad();
}

std::vector<std::size_t> every(std::size_t count) {
  std::vector<std::size_t> all(count);
  std::iota(all.begin(), all.end(), std::size_t{0});
  return all;
}

struct Case {
  std::string model;
  int devices;
};

class DataParallelTraining : public ::testing::TestWithParam<Case> {};

TEST_P(DataParallelTraining, EqualsOneProcessOnTheWholeBatch) {
  Devices devices = Devices::cpu(GetParam().devices);
  DataParallel model(model_of(spec_of(GetParam().model), devices[0]), devices);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec_of(GetParam().model), *alone_backend);
  const auto optimizer = nn::make_sgd(model.named_parameters(), {.momentum = 0.9});
  const auto reference = nn::make_sgd(alone->named_parameters(), {.momentum = 0.9});
  nn::Tape tape(model.output_backend()), alone_tape(*alone_backend);
  const auto all = every(alone->named_parameters().size());
  // 10 over 3 is 4, 4, 2; fewer than devices; as many; another size again.
  for (const std::int64_t count : {10, 1, 2, 32, 3, 10, 30}) {
    SCOPED_TRACE(count);
    const auto seed = static_cast<std::uint64_t>(count);
    const auto run = [&](nn::Module& module, nn::Tape& on) {
      clear_grads(module);
      const nn::Var x = on.input(random_tensor(on.backend(), {count, kSide, kSide, 1}, seed));
      const nn::Var y = module.forward(on, x);
      const nn::Tensor logits = y.value();
      const nn::Loss loss =
          nn::cross_entropy(on, y, random_labels(on.backend(), {count}, seed + 1000), 1.0f / static_cast<float>(count));
      on.backward(loss.value);
      return logits;
    };
    expect_close(run(model, tape), run(*alone, alone_tape), "logits");
    tape.reset();
    alone_tape.reset();
    expect_same_gradients(model, *alone);
    optimizer->begin_step(0.05);
    optimizer->update(all);
    reference->begin_step(0.05);
    reference->update(all);
  }
  const auto mine = model.named_parameters(), wanted = alone->named_parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_EQ(mine[i].name, "module." + wanted[i].name);
    expect_close(mine[i].parameter->value(), wanted[i].parameter->value(), mine[i].name, 3e-5f);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DataParallelTraining,
                         ::testing::Values(Case{"cnn", 1}, Case{"cnn", 2}, Case{"cnn", 3}, Case{"cnn", 4},
                                           Case{"lstm", 1}, Case{"lstm", 2}, Case{"lstm", 3}, Case{"lstm", 4},
                                           Case{"mlp", 3}, Case{"linear", 8}),
                         [](const auto& test) {
                           return test.param.model + "_on_" + std::to_string(test.param.devices);
                         });

// The tutorial's module, which says what it sees.
class Seen final : public nn::Module {
 public:
  struct Log {
    std::mutex mutex;
    Shapes shapes;
    Shapes take() {
      std::ranges::sort(shapes, std::greater<>());
      return std::exchange(shapes, {});
    }
  };
  Seen(nn::Context& context, Log* log, int throws_on = -1)
      : fc_(register_module("fc", std::make_unique<nn::Linear>(context, 5, 2))), log_(log), throws_on_(throws_on) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    {
      const std::lock_guard lock(log_->mutex);
      log_->shapes.push_back(to_string(x.shape()));
    }
    if (x.shape()[0] == throws_on_) throw UsageError("this piece is one too many", "take another");
    return fc_.forward(tape, x);
  }

 private:
  nn::Linear& fc_;
  Log* log_;
  std::int64_t throws_on_;
};

TEST(DataParallel, ShowsTheModuleItsPieces) {
  Seen::Log log;
  struct Wanted {
    int devices;
    Shapes of_30, of_10;
  };
  for (const Wanted& wanted :
       {Wanted{1, {"[30, 5]"}, {"[10, 5]"}}, Wanted{2, {"[15, 5]", "[15, 5]"}, {"[5, 5]", "[5, 5]"}},
        Wanted{3, {"[10, 5]", "[10, 5]", "[10, 5]"}, {"[4, 5]", "[4, 5]", "[2, 5]"}},
        Wanted{8,
               {"[4, 5]", "[4, 5]", "[4, 5]", "[4, 5]", "[4, 5]", "[4, 5]", "[4, 5]", "[2, 5]"},
               {"[2, 5]", "[2, 5]", "[2, 5]", "[2, 5]", "[2, 5]"}}}) {
    Devices devices = Devices::cpu(wanted.devices);
    nn::Generator generator(1);
    nn::Context context{devices[0], generator};
    DataParallel model(nn::build<Seen>(context, &log), devices);
    nn::Tape tape(model.output_backend());
    for (const std::int64_t count : {30, 30, 30, 10}) {
      const nn::Var y = model.forward(tape, tape.input(random_tensor(devices[0], {count, 5}, 3)));
      EXPECT_EQ(y.shape(), (nn::Shape{count, 2}));
      EXPECT_EQ(log.take(), count == 30 ? wanted.of_30 : wanted.of_10);
      tape.reset();
    }
  }
}

// Sequence first: x (T, N, features).
class SequenceFirst final : public nn::Module {
 public:
  SequenceFirst(nn::Context& context, std::int64_t in, std::int64_t hidden)
      : rnn_(register_module("rnn",
                             std::make_unique<nn::Lstm>(context, in, hidden,
                                                        nn::RecurrentOptions{.num_layers = 2, .batch_first = false}))),
        out_(register_module("out", std::make_unique<nn::Linear>(context, hidden, kClasses))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override { return out_.forward(tape, rnn_.forward(tape, x)); }

 private:
  nn::Lstm& rnn_;
  nn::Linear& out_;
};

TEST(DataParallel, CutsAlongAnotherAxis) {
  constexpr std::int64_t kSteps = 6, kIn = 5;
  const auto alone_backend = nn::make_cpu_backend(1);
  nn::Generator same(7);
  nn::Context alone_context{*alone_backend, same};
  SequenceFirst alone(alone_context, kIn, 9);
  nn::Tape alone_tape(*alone_backend);
  for (const int count : {2, 3, 4}) {
    for (const int dim : {1, -2}) {
      Devices devices = Devices::cpu(count);
      nn::Generator generator(7);
      nn::Context context{devices[0], generator};
      DataParallel model(nn::build<SequenceFirst>(context, kIn, 9), devices, {}, {}, dim);
      nn::Tape tape(model.output_backend());
      for (const std::int64_t samples : {10, 3, 1}) {
        SCOPED_TRACE(samples);
        const auto run = [&](nn::Module& module, nn::Tape& on) {
          clear_grads(module);
          const nn::Var y = module.forward(on, on.input(random_tensor(on.backend(), {kSteps, samples, kIn}, 5)));
          const nn::Tensor logits = y.value();
          on.backward(nn::cross_entropy(on, y, random_labels(on.backend(), {kSteps, samples}, 6), 0.1f).value);
          return logits;
        };
        expect_close(run(model, tape), run(alone, alone_tape), "logits");
        expect_same_gradients(model, alone);
        tape.reset();
        alone_tape.reset();
      }
    }
  }
}

TEST(DataParallel, UsesTheDevicesItIsGiven) {
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec_of("mlp"), *alone_backend);
  nn::Tape alone_tape(*alone_backend);
  const nn::Tensor labels = random_labels(*alone_backend, {10}, 2);
  alone_tape.backward(
      nn::cross_entropy(alone_tape,
                        alone->forward(alone_tape, alone_tape.input(random_tensor(*alone_backend, {10, 8, 8, 1}, 1))),
                        labels, 0.1f)
          .value);
  struct Choice {
    std::vector<int> ids;
    std::optional<int> output;
  };
  for (const Choice& choice : {Choice{{1, 2}, {}}, Choice{{2, 0, 1}, {}}, Choice{{0, 1}, 1}, Choice{{1, 2}, 0},
                               Choice{{2}, {}}, Choice{{2}, 0}, Choice{{0, 1, 2}, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(choice.ids));
    for (int where = 0; where < 3; ++where) {  // the input's device
      Devices devices = Devices::cpu(3);
      DataParallel model(model_of(spec_of("mlp"), devices[choice.ids.front()]), devices, choice.ids, choice.output);
      EXPECT_EQ(model.output_device(), choice.output.value_or(choice.ids.front()));
      nn::Tape tape(model.output_backend());
      for (int pass = 0; pass < 2; ++pass) {
        clear_grads(model);
        const nn::Var y = model.forward(tape, random_tensor(devices[where], {10, 8, 8, 1}, 1), devices[where]);
        tape.backward(nn::cross_entropy(tape, y, random_labels(model.output_backend(), {10}, 2), 0.1f).value);
        expect_same_gradients(model, *alone);
        tape.reset();
      }
      const auto use = model.use();
      const bool apart = std::ranges::find(choice.ids, model.output_device()) == choice.ids.end();
      ASSERT_EQ(use.size(), choice.ids.size() + (apart ? 1 : 0));
      EXPECT_EQ(use.back().id, apart ? *choice.output : choice.ids.back());
    }
  }
}

TEST(DataParallel, GivesTheInputItsGradient) {
  Devices devices = Devices::cpu(3);
  DataParallel model(model_of(spec_of("cnn"), devices[0]), devices);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec_of("cnn"), *alone_backend);
  const auto run = [&](nn::Module& module, nn::Backend& backend) {
    nn::Tape tape(backend);
    const nn::Var x = tape.differentiable_input(random_tensor(backend, {10, 8, 8, 1}, 1));
    tape.backward(nn::cross_entropy(tape, module.forward(tape, x), random_labels(backend, {10}, 2), 0.1f).value);
    return tape.grad(x);
  };
  expect_close(run(model, devices[0]), run(*alone, *alone_backend), "x");
}

TEST(DataParallel, RunsSeveralTimesOnOneTapeAndAddsUp) {
  Devices devices = Devices::cpu(3);
  DataParallel model(model_of(spec_of("mlp"), devices[0]), devices);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec_of("mlp"), *alone_backend);
  const auto run = [](nn::Module& module, nn::Tape& tape) {
    nn::Backend& backend = tape.backend();
    const nn::Var a = module.forward(tape, tape.input(random_tensor(backend, {10, 8, 8, 1}, 1)));
    const nn::Var b = module.forward(tape, tape.input(random_tensor(backend, {10, 8, 8, 1}, 3)));
    // Also in between: what is not walked backwards is forgotten.
    module.forward(tape, tape.input(random_tensor(backend, {5, 8, 8, 1}, 4)));
    tape.backward(nn::cross_entropy(tape, nn::add(tape, a, b), random_labels(backend, {10}, 2), 0.1f).value);
    tape.reset();
  };
  nn::Tape tape(devices[0]), alone_tape(*alone_backend);
  for (int i = 0; i < 3; ++i) {  // gradients are not forgotten in between: they add up
    run(model, tape);
    run(*alone, alone_tape);
    expect_same_gradients(model, *alone);
  }
}

TEST(DataParallel, ParameterIsReadyOnceAfterTheSum) {
  Devices devices = Devices::cpu(3);
  auto module = model_of(spec_of("mlp"), devices[0]);
  module->named_parameters()[2].parameter->set_requires_grad(false);
  DataParallel model(*module, devices);
  const auto parameters = module->named_parameters();
  std::vector<int> ready(parameters.size(), 0);
  std::vector<std::vector<float>> then(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i].parameter->on_ready = [&, i] {
      ++ready[i];
      const auto values = parameters[i].parameter->gradient().span<float>();
      then[i].assign(values.begin(), values.end());
    };
  nn::Tape tape(devices[0]);
  const nn::Var y = model.forward(tape, tape.input(random_tensor(devices[0], {10, 8, 8, 1}, 1)));
  tape.backward(nn::cross_entropy(tape, y, random_labels(devices[0], {10}, 2), 0.1f).value);
  EXPECT_THAT(ready, ElementsAre(1, 1, 0, 1, 1, 1));
  EXPECT_FALSE(parameters[2].parameter->has_gradient());
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (i != 2) {
      EXPECT_TRUE(std::ranges::equal(then[i], parameters[i].parameter->gradient().span<float>())) << i;
    }
}

TEST(DataParallel, SendsOnlyWhatHasChanged) {
  Devices devices = Devices::cpu(2);
  DataParallel model(model_of(spec_of("linear"), devices[0]), devices);
  nn::Tape tape(devices[0]);
  tape.set_recording(false);
  const auto forward = [&] {
    const auto before = model.use();
    const nn::Tensor y = model.forward(tape, tape.input(random_tensor(devices[0], {4, 8, 8, 1}, 1))).value();
    tape.reset();
    const auto after = model.use();
    EXPECT_EQ(after[0].bytes_out - before[0].bytes_out, after[1].bytes_in - before[1].bytes_in);
    EXPECT_EQ(after[1].bytes_out - before[1].bytes_out, 2u * kClasses * 4);
    return std::pair(y, after[1].bytes_in - before[1].bytes_in);
  };
  const std::uint64_t piece = 2 * 64 * 4, parameters = (64 * kClasses + kClasses) * 4;
  const auto [first, first_bytes] = forward();
  EXPECT_EQ(first_bytes, piece + parameters);
  EXPECT_EQ(forward().second, piece);
  const auto bias = model.named_parameters()[1].parameter;
  for (std::int64_t i = 0; i < kClasses; ++i) bias->value().f32()[i] += 1.0f;
  bias->changed();
  const auto [second, second_bytes] = forward();
  EXPECT_EQ(second_bytes, piece + kClasses * 4);
  for (std::int64_t i = 0; i < second.count(); ++i) EXPECT_NEAR(second.f32()[i], first.f32()[i] + 1.0f, 1e-5f);
}

TEST(DataParallel, KeepsTheFirstDevicesStatistics) {
  const nn::ModelSpec spec = {.name = "resnet18-cifar", .sample_shape = {8, 8, 3}, .classes = kClasses};
  Devices devices = Devices::cpu(2);
  DataParallel model(model_of(spec, devices[0]), devices);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec, *alone_backend);
  nn::Tape tape(devices[0]), alone_tape(*alone_backend);
  const nn::Tensor x = random_tensor(devices[0], {5, 8, 8, 3}, 1);
  for (int i = 0; i < 2; ++i) {
    model.forward(tape, tape.input(x));
    alone->forward(alone_tape, alone_tape.input(x.slice(0, 3)));  // 5 over 2 is 3, 2
    tape.reset();
    alone_tape.reset();
  }
  const auto mine = model.named_buffers(), wanted = alone->named_buffers();
  ASSERT_EQ(mine.size(), wanted.size());
  for (std::size_t i = 0; i < mine.size(); ++i)
    EXPECT_EQ(std::memcmp(mine[i].tensor->raw(), wanted[i].tensor->raw(), mine[i].tensor->bytes()), 0) << mine[i].name;
  // In evaluation mode all devices use them, also where convolutions have absorbed them.
  model.train(false);
  alone->train(false);
  tape.set_recording(false);
  alone_tape.set_recording(false);
  const nn::Tensor plain = alone->forward(alone_tape, alone_tape.input(x)).value();
  expect_close(model.forward(tape, tape.input(x)).value(), plain, "evaluated");
  model.fuse();
  expect_close(model.forward(tape, tape.input(x)).value(), plain, "fused", 1e-4f);
  EXPECT_THROW(model.train(true), UsageError);
}

TEST(DataParallel, DropsWhatOneProcessWouldDrop) {
  nn::ModelSpec spec = spec_of("lstm");
  spec.settings.set("dropout", 0.4);
  Devices devices = Devices::cpu(3);
  DataParallel model(model_of(spec, devices[0]), devices);
  const auto alone_backend = nn::make_cpu_backend(1);
  const auto alone = model_of(spec, *alone_backend);
  const auto run = [&](nn::Module& module, nn::Backend& backend, std::int64_t step) {
    nn::Tape tape(backend);
    const nn::Tensor state = backend.empty({3}, DType::kI64);
    state.data<std::int64_t>()[0] = 9;
    state.data<std::int64_t>()[1] = step;
    state.data<std::int64_t>()[2] = 40;
    tape.set_dropout_state(state);
    clear_grads(module);
    const nn::Var y = module.forward(tape, tape.input(random_tensor(backend, {10, 8, 8, 1}, 1)));
    tape.backward(nn::cross_entropy(tape, y, random_labels(backend, {10}, 2), 0.1f).value);
  };
  for (const std::int64_t step : {1, 2}) {
    run(model, devices[0], step);
    run(*alone, *alone_backend, step);
    expect_same_gradients(model, *alone);
  }
}

TEST(DataParallel, IsDeterministic) {
  const auto train = [] {
    Devices devices = Devices::cpu(4);
    DataParallel model(model_of(spec_of("cnn"), devices[0]), devices);
    const auto optimizer = nn::make_adamw(model.named_parameters(), {});
    nn::Tape tape(devices[0]);
    for (std::uint64_t step = 1; step <= 5; ++step) {
      clear_grads(model);
      const nn::Var y = model.forward(tape, tape.input(random_tensor(devices[0], {13, 8, 8, 1}, step)));
      tape.backward(nn::cross_entropy(tape, y, random_labels(devices[0], {13}, step), 1.0f / 13).value);
      optimizer->begin_step(1e-3);
      optimizer->update(every(model.named_parameters().size()));
      tape.reset();
    }
    return nn::parameters_sha256(model);
  };
  EXPECT_EQ(train(), train());
}

TEST(DataParallel, LoadsAndSavesAsTheModuleAlone) {
  Devices devices = Devices::cpu(2);
  DataParallel model(model_of(spec_of("mlp"), devices[0], 1), devices);
  auto other = model_of(spec_of("mlp"), devices[1], 2);
  EXPECT_NE(nn::parameters_sha256(model.module()), nn::parameters_sha256(*other));
  nn::load_state(*other, nn::state_of(model), "dp");
  EXPECT_EQ(nn::parameters_sha256(model.module()), nn::parameters_sha256(*other));
  auto third = model_of(spec_of("mlp"), devices[1], 3);
  nn::load_state(model, nn::state_of(*third), "alone");
  EXPECT_EQ(nn::parameters_sha256(model.module()), nn::parameters_sha256(*third));
  EXPECT_THAT(to_string(model), HasSubstr("DataParallel(\n  (module): Mlp("));
}

template <class Call>
std::string complaint(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.line().find('\n'), std::string::npos);
    EXPECT_THAT(error.line(), HasSubstr("→"));
    return error.line();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(DataParallel, InvalidOptionsAreRefused) {
  Devices devices = Devices::cpu(3);
  const auto wrap = [&](const DeviceIds& ids, std::optional<int> output = {}, int on = 0) {
    return complaint([&] { DataParallel(model_of(spec_of("mlp"), devices[on]), devices, ids, output); });
  };
  EXPECT_THAT(wrap({0, 1, 0}), HasSubstr("device_ids names cpu:0 twice"));
  EXPECT_THAT(wrap({0, 3}), HasSubstr("device_ids names device 3, and there are 3 devices, cpu:0 to cpu:2"));
  EXPECT_THAT(wrap({-1}), HasSubstr("device -1"));
  EXPECT_THAT(wrap(std::vector<int>{}), HasSubstr("device_ids is empty"));
  EXPECT_THAT(wrap({0, 1}, 7), HasSubstr("output_device is 7"));
  EXPECT_THAT(wrap({1, 2}), HasSubstr("must be on device_ids[0], which is cpu:1, and its fc1.weight is on cpu:0"));
  EXPECT_THAT(wrap({}, {}, 2), HasSubstr("which is cpu:0, and its fc1.weight is on cpu:2"));
  EXPECT_THAT(complaint([&] { DataParallel(nullptr, devices); }), HasSubstr("without a module"));
  EXPECT_THAT(complaint([&] { devices[3]; }), HasSubstr("no device 3"));
  EXPECT_THAT(complaint([] { Devices::cpu(0); }), HasSubstr("without devices"));

  nn::Generator generator(1);
  nn::Context context{devices[0], generator};
  EXPECT_THAT(complaint([&] { DataParallel(std::make_unique<nn::Linear>(context, 5, 2), devices); }),
              HasSubstr("Linear cannot be built again on another device"));
  DataParallel one(std::make_unique<nn::Linear>(context, 5, 2), devices, {0});  // which nobody has to build again
  nn::Tape tape(devices[0]), elsewhere(devices[1]);
  EXPECT_EQ(one.forward(tape, tape.input(random_tensor(devices[0], {4, 5}, 1))).shape(), (nn::Shape{4, 2}));
  EXPECT_THAT(complaint([&] {
                one.forward(elsewhere, random_tensor(devices[1], {4, 5}, 1), devices[1]);
              }),
              HasSubstr("the tape is on cpu:1, and output_device is cpu:0"));

  DataParallel wide(nn::build<nn::Linear>(context, 5, 2), devices, {}, {}, 2);
  EXPECT_THAT(complaint([&] {
                wide.forward(tape, tape.input(random_tensor(devices[0], {4, 5}, 1)));
              }),
              HasSubstr("axis 2 of [4, 5]"));
  // A factory that builds something else, or elsewhere.
  int built = 0;
  DataParallel changing(
      nn::build_from(context, [&](nn::Context& c) { return std::make_unique<nn::Linear>(c, 5, ++built); }), devices);
  EXPECT_THAT(complaint([&] {
                changing.forward(tape, tape.input(random_tensor(devices[0], {4, 5}, 1)));
              }),
              HasSubstr("the factory of Linear builds another module: weight is [2, 5] and not [1, 5]"));
  DataParallel homesick(
      nn::build_from(context, [&](nn::Context&) { return std::make_unique<nn::Linear>(context, 5, 2); }), devices);
  EXPECT_THAT(complaint([&] {
                homesick.forward(tape, tape.input(random_tensor(devices[0], {4, 5}, 1)));
              }),
              HasSubstr("weight is on cpu:0 and not on cpu:1"));
}

TEST(DataParallel, ReplicaFailureNamesTheDeviceAndIsRecoverable) {
  Seen::Log log;
  Devices devices = Devices::cpu(3);
  nn::Generator generator(1);
  nn::Context context{devices[0], generator};
  DataParallel model(nn::build<Seen>(context, &log, /*throws_on=*/2), devices);
  const auto fails = [&](nn::Tape& tape, std::int64_t samples, std::int64_t features) {
    return complaint([&] { model.forward(tape, tape.input(random_tensor(devices[0], {samples, features}, 1))); });
  };
  nn::Tape tape(devices[0]);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(fails(tape, 10, 5), HasSubstr("replica 2 of 3 on cpu:2: this piece is one too many"));
    EXPECT_THAT(fails(tape, 9, 4),
                HasSubstr("replica 0 of 3 on cpu:0: fc: Linear with a weight of [2, 5] was given [3, 4]"));
    tape.reset();
    clear_grads(model);
    const nn::Var y = model.forward(tape, tape.input(random_tensor(devices[0], {9, 5}, 1)));
    const nn::Tensor target = random_tensor(devices[0], {9, 2}, 2);
    tape.backward(nn::squared_error(tape, y, target, 1.0f).value);
    tape.reset();
    const auto alone_backend = nn::make_cpu_backend(1);
    nn::Generator same(1);
    nn::Context alone_context{*alone_backend, same};
    Seen alone(alone_context, &log);
    nn::Tape alone_tape(*alone_backend);
    alone_tape.backward(
        nn::squared_error(alone_tape,
                          alone.forward(alone_tape, alone_tape.input(random_tensor(*alone_backend, {9, 5}, 1))),
                          random_tensor(*alone_backend, {9, 2}, 2), 1.0f)
            .value);
    expect_same_gradients(model, alone);
  }
}

}  // namespace
}  // namespace lockstep::parallel
