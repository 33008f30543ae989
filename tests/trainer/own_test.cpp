// Training of a program's own model, data and loss, as its calls go wrong.
#include <gmock/gmock.h>

#include <cmath>

#include "base/error.h"
#include "lockstep/data/families.h"
#include "lockstep/trainer.h"
#include "tests/support/models.h"
#include "tests/support/temporary_directory.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// `size` samples of two numbers; targets, or labels of three classes, follow from them.
class Points final : public data::Dataset {
 public:
  explicit Points(Info info) : Dataset(std::move(info)) {}
  void read_sample(std::uint64_t index, const data::Sample& sample) const override {
    for (std::size_t i = 0; i < sample.x.size(); ++i)
      sample.x[i] = static_cast<float>((index * 7 + i * 3) % 11) / 11.0f - 0.5f;
    for (std::size_t i = 0; i < sample.targets.size(); ++i) sample.targets[i] = sample.x[0] * static_cast<float>(i + 1);
    for (std::size_t i = 0; i < sample.labels.size(); ++i) sample.labels[i] = sample.x[0] > 0 ? 1 : 0;
  }
};

std::shared_ptr<Points> numbers(std::vector<std::int64_t> target_dims = {1}) {
  return std::make_shared<Points>(data::Dataset::Info{
      .name = "points", .size = 40, .dims = {2}, .target_dims = std::move(target_dims), .numeric_targets = true});
}

class Net final : public nn::Module {
 public:
  Net(nn::Context& context, std::int64_t out) : out_(register_module<nn::Linear>("out", context, 2, out)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override { return out_.forward(tape, x); }

 private:
  nn::Linear& out_;
};

/// No setting says that it draws random numbers.
class Noisy final : public nn::Module {
 public:
  explicit Noisy(nn::Context& context)
      : drop_(register_module("drop", std::make_unique<nn::Dropout>(0.3, /*layer=*/0))),
        out_(register_module<nn::Linear>("out", context, 2, 1)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    if (training()) x = nn::add(tape, x, nn::randn(tape, x.shape(), /*layer=*/1));
    return out_(tape, drop_(tape, x));
  }

 private:
  nn::Dropout& drop_;
  nn::Linear& out_;
};

class LooksAtNumbers final : public nn::Module {
 public:
  explicit LooksAtNumbers(nn::Context& context) : out_(register_module<nn::Linear>("out", context, 2, 1)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_.forward(tape, x.value().count() > 0 && x.value().f32()[0] > 0 ? x : nn::relu(tape, x));
  }

 private:
  nn::Linear& out_;
};

nn::Loss absolute(nn::Tape& tape, nn::Var y, const nn::Tensor& targets, float scale) {
  return nn::sum(tape, nn::abs(tape, nn::sub(tape, y, tape.input(targets))), scale);
}

TrainConfig quiet() {
  TrainConfig config;
  config.quiet = true;
  config.steps = 3;
  config.threads = 1;
  return config;
}

std::string error_of(const TrainConfig& config, const OwnTraining& own) {
  try {
    train(config, own);
  } catch (const UsageError& error) {
    return error.line();
  }
  return "no error";
}

TEST(OwnTraining, ModelsThatDrawRandomNumbers) {
  const data::DataSplits splits = {.train = numbers(), .validation = numbers()};
  EXPECT_EQ(train(quiet(), {.model = nn::factory<Noisy>(), .data = splits, .loss = absolute, .name = "noisy"}), 0);
  TrainConfig in_parts = quiet();
  in_parts.accumulate = 2;
  EXPECT_EQ(train(in_parts, {.model = nn::factory<Noisy>(), .data = splits, .loss = absolute, .name = "noisy2"}), 0);
}

struct Called {
  std::vector<std::int64_t> steps, evaluations, epochs;
  std::vector<double> rates;
};

TEST(OwnTraining, HooksAreCalledInTheirOrder) {
  Called called;
  TrainHooks hooks;
  hooks.learning_rate = [](std::int64_t step, std::int64_t total) {
    return 0.1 * static_cast<double>(step + 1) / static_cast<double>(total);
  };
  hooks.on_step = [&](const StepReport& report) {
    called.steps.push_back(report.step);
    called.rates.push_back(report.lr);
  };
  hooks.on_evaluation = [&](const EvalReport& report) {
    called.evaluations.push_back(report.step);
    EXPECT_EQ(called.steps.back(), report.step) << "steps are reported before";
    ASSERT_EQ(report.own.size(), 2u);
    EXPECT_EQ(report.own[0], (std::pair<std::string, double>{"count", 40}));
    EXPECT_NEAR(report.own[1].second, report.loss, 1e-5) << "the same, by a metric";
  };
  hooks.on_epoch = [&](std::int64_t epoch) {
    called.epochs.push_back(epoch);
    EXPECT_EQ(called.evaluations.size(), called.epochs.size()) << "evaluations come before";
  };
  hooks.metrics = {{.name = "count",
                    .add = [](const EvaluatedBatch& batch,
                              std::span<double> sums) { sums[0] += static_cast<double>(batch.samples); },
                    .value = [](std::span<const double> sums) { return sums[0]; }},
                   {.name = "distance",
                    .sums = 2,
                    .add =
                        [](const EvaluatedBatch& batch, std::span<double> sums) {
                          for (std::size_t i = 0; i < batch.samples; ++i)
                            sums[0] += std::abs(double{batch.outputs[i]} - double{batch.targets[i]});
                          sums[1] += static_cast<double>(batch.samples);
                        },
                    .value = [](std::span<const double> sums) { return sums[0] / sums[1]; },
                    .largest_is_best = false}};
  TrainConfig config = quiet();
  config.steps.reset();
  config.epochs = 3;
  config.global_batch = 20;
  config.save_best = "distance";
  const lockstep::testing::TemporaryDirectory directory;
  config.save = (directory.path() / "best.safetensors").string();
  EXPECT_EQ(train(config, {.model = nn::factory<Net>(1),
                           .data = {.train = numbers(), .validation = numbers()},
                           .loss = absolute,
                           .name = "hooked",
                           .hooks = hooks}),
            0);
  EXPECT_EQ(called.steps, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(called.evaluations, (std::vector<std::int64_t>{2, 4, 6}));
  EXPECT_EQ(called.epochs, (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_DOUBLE_EQ(called.rates[2], 0.05);
}

TEST(OwnTraining, HooksThatGoWrong) {
  const auto error_with = [&](TrainHooks hooks) {
    return error_of(quiet(), {.model = nn::factory<Net>(1),
                              .data = {.train = numbers(), .validation = numbers()},
                              .loss = absolute,
                              .name = "hooked",
                              .hooks = std::move(hooks)});
  };
  const OwnMetric good = {.name = "mine",
                          .add = [](const EvaluatedBatch&, std::span<double>) {},
                          .value = [](std::span<const double>) { return 1.0; }};
  OwnMetric nameless = good, taken = good, empty = good;
  nameless.name = "my metric";
  taken.name = "loss";
  empty.sums = 0;
  EXPECT_THAT(error_with({.metrics = {nameless}}), HasSubstr("a metric named 'my metric'"));
  EXPECT_THAT(error_with({.metrics = {taken}}), HasSubstr("a second metric named 'loss'"));
  EXPECT_THAT(error_with({.metrics = {good, good}}), HasSubstr("a second metric named 'mine'"));
  EXPECT_THAT(error_with({.metrics = {empty}}), HasSubstr("a metric 'mine' without sums"));
  EXPECT_THAT(error_with({.learning_rate = [](std::int64_t, std::int64_t) { return std::nan(""); }}),
              HasSubstr("a learning rate of nan for step 1"));
  TrainConfig warm = quiet();
  warm.warmup = 3;
  EXPECT_THAT(error_of(warm, {.model = nn::factory<Net>(1),
                              .data = {.train = numbers()},
                              .loss = absolute,
                              .hooks = {.learning_rate = [](std::int64_t, std::int64_t) { return 0.1; }}}),
              HasSubstr("the program decides learning rates itself"));
  EXPECT_THAT(error_with({.on_step = [](const StepReport&) { throw UsageError("enough", "stop"); }}),
              HasSubstr("enough"));
}

TEST(OwnTraining, TrainsWithAndWithoutAnEvaluation) {
  EXPECT_EQ(train(quiet(), {.model = nn::factory<Net>(1), .data = {.train = numbers()}, .loss = absolute}), 0);
  EXPECT_EQ(
      train(quiet(),
            {.model = nn::factory<Net>(1), .data = {.train = numbers(), .validation = numbers()}, .loss = absolute}),
      0);
}

TEST(OwnTraining, TakesALossByName) {
  TrainConfig config = quiet();
  config.loss = "squared_error";
  EXPECT_EQ(train(config, {.model = nn::factory<Net>(6), .data = {.train = numbers({6})}}), 0);
  config.loss = "";  // the usual one for numbers
  EXPECT_EQ(train(config, {.model = nn::factory<Net>(6), .data = {.train = numbers({6})}}), 0);
  config.loss = "cross_entropy";
  EXPECT_THAT(error_of(config, {.model = nn::factory<Net>(1), .data = {.train = numbers()}}),
              HasSubstr("the targets of points are numbers, and the loss cross_entropy takes labels → use --loss "
                        "squared_error"));
}

// As many as a sample has: PyTorch's mean over all of them.
TEST(OwnTraining, LossesAreMeansOverTargets) {
  testing::TemporaryDirectory directory;
  TrainConfig config = quiet();
  config.loss = "squared_error";
  config.lr = 0;
  config.metrics = (directory.path() / "m.jsonl").string();
  const auto zero = [](nn::Context& context) -> std::unique_ptr<nn::Module> {
    auto net = std::make_unique<Net>(context, 2);
    for (const auto& [name, parameter] : net->named_parameters())
      context.backend.pointwise().fill(parameter->value(), 0.0f);
    return net;
  };
  config.batch = 40;
  config.steps = 1;
  ASSERT_EQ(train(config, {.model = zero, .data = {.train = numbers({2})}}), 0);
  double sum = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    float x[2], targets[2];
    numbers({2})->read_sample(i, {.x = x, .tokens = {}, .labels = {}, .targets = targets});
    for (const float t : targets) sum += static_cast<double>(t) * static_cast<double>(t);
  }
  const std::string text = testing::read_file(directory.path() / "m.jsonl");
  const auto at = text.find("\"loss\":", text.find("\"event\":\"step\""));
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_NEAR(std::stod(text.substr(at + 7)), sum / 80, 1e-6);
}

TEST(OwnTraining, LabelsOfAnyShape) {
  const auto labels = std::make_shared<Points>(
      data::Dataset::Info{.name = "pixels", .size = 40, .dims = {3, 2}, .classes = 2, .target_dims = {3}});
  EXPECT_EQ(train(quiet(), {.model = nn::factory<Net>(2), .data = {.train = labels, .validation = labels}}), 0);
}

// A module of two inputs and two outputs, on data that have them.
class MaskedPoints final : public data::Dataset {
 public:
  MaskedPoints()
      : Dataset({.name = "masked points",
                 .size = 40,
                 .dims = {testing::Fusion::kFeatures},
                 .classes = testing::Fusion::kClasses,
                 .further_inputs = {{.name = "mask", .dims = {testing::Fusion::kHidden}}}}) {}
  void read_sample(std::uint64_t index, const data::Sample& sample) const override {
    for (std::size_t i = 0; i < sample.x.size(); ++i)
      sample.x[i] = static_cast<float>((index * 7 + i * 3) % 11) / 11.0f - 0.5f;
    const std::span<float> mask = sample.further[0].numbers;
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = (index + i) % 4 == 0 ? 0.0f : 1.0f;
    sample.labels[0] = static_cast<std::int32_t>(index % testing::Fusion::kClasses);
  }
};

double last_loss(const std::filesystem::path& metrics) {
  const std::string text = testing::read_file(metrics);
  const auto at = text.rfind("\"grad_norm\"");
  const auto loss = text.rfind("\"loss\":", at);
  EXPECT_NE(loss, std::string::npos) << text;
  return std::stod(text.substr(loss + 7));
}

TEST(OwnTraining, SeveralInputsAndOutputs) {
  testing::TemporaryDirectory directory;
  const auto points = std::make_shared<MaskedPoints>();
  std::vector<double> losses;
  // On one device, in parts, and on several devices, each of which computes the loss of its part.
  for (const int way : {0, 1, 2}) {
    TrainConfig config = quiet();
    config.steps = 6;
    config.global_batch = 20;
    config.metrics = (directory.path() / (std::to_string(way) + ".jsonl")).string();
    if (way == 1) config.accumulate = 3;
    if (way == 2) {
      config.parallel = Parallel::kDp;
      config.device = "cpu:0,1,2";
    }
    EXPECT_EQ(train(config, {.model = nn::factory<testing::Fusion>(),
                             .data = {.train = points, .validation = points},
                             .loss = testing::joint_loss}),
              0);
    losses.push_back(last_loss(config.metrics));
  }
  EXPECT_GT(losses[0], 0);
  EXPECT_NEAR(losses[1], losses[0], 1e-5 * losses[0]);  // f32 sums in another order
  EXPECT_NEAR(losses[2], losses[0], 1e-5 * losses[0]);
}

TEST(OwnTraining, InputsThatNobodyTakes) {
  const auto points = std::make_shared<MaskedPoints>();
  EXPECT_THAT(error_of(quiet(), {.model = nn::factory<Net>(1), .data = {.train = points}}),
              HasSubstr("Net takes 1 input, and was given 2"));
  EXPECT_THAT(
      error_of(quiet(),
               {.model = nn::factory<testing::Fusion>(), .data = {.train = numbers()}, .loss = testing::joint_loss}),
      HasSubstr("Fusion takes 2 inputs, and was given 1"));
  EXPECT_THAT(error_of(quiet(), {.model = nn::factory<testing::Fusion>(), .data = {.train = points}}),
              HasSubstr("2 values where 1 is expected → take as many as there are"));
  data::register_dataset({.name = "masked", .about = "points", .open = [&](const auto&, const auto&, const auto&) {
                            return data::DataSplits{.train = points, .validation = points};
                          }});
  TrainConfig config = quiet();
  config.model.name = "mlp";
  config.data = "masked";
  EXPECT_THAT(
      [&]() -> std::string {
        try {
          train(config);
        } catch (const UsageError& error) {
          return error.line();
        }
        return "no error";
      }(),
      HasSubstr("mlp takes one input, and the samples of masked points have 2 → train a model of your own"));
}

// A checkpoint knows what the samples' further inputs were.
TEST(OwnTraining, ResumingWithOtherInputs) {
  const auto identity_with = [](std::vector<data::Dataset::Input> further) {
    const Points points(
        {.name = "points", .size = 40, .dims = {6}, .classes = 3, .further_inputs = std::move(further)});
    TrainConfig config;
    config.model = {"mlp", {}};
    return plan_of(config, points, 1, 10).identity;
  };
  const auto none = identity_with({});
  const auto mask = identity_with({{.name = "mask", .dims = {8}}});
  EXPECT_EQ(mask.size(), none.size() + 1);  // without any, as in checkpoints of versions that knew none
  EXPECT_NE(identity_with({{.name = "mask", .dims = {8}, .integers = true}}), mask);
  EXPECT_NE(identity_with({{.name = "type", .dims = {8}}}), mask);
}

TEST(OwnTraining, AnEvaluationOnSamplesOfAnotherKind) {
  const auto points = std::make_shared<MaskedPoints>();
  const auto other = std::make_shared<Points>(
      data::Dataset::Info{.name = "bare points", .size = 40, .dims = {testing::Fusion::kFeatures}, .classes = 3});
  EXPECT_THAT(error_of(quiet(), {.model = nn::factory<testing::Fusion>(),
                                 .data = {.train = points, .validation = other},
                                 .loss = testing::joint_loss}),
              AllOf(HasSubstr("masked points has samples [6] f32, mask [8] f32, targets [] i32"),
                    HasSubstr("bare points has [6] f32, targets [] i32")));
}

TEST(OwnTraining, MissingOrDuplicateNames) {
  EXPECT_THAT(error_of(quiet(), {.data = {.train = numbers()}}), HasSubstr("training without a model → "));
  EXPECT_THAT(error_of(quiet(), {.model = nn::factory<Net>(1)}), HasSubstr("training without data → "));
  TrainConfig named = quiet();
  named.model.name = "mlp";
  EXPECT_THAT(error_of(named, {.model = nn::factory<Net>(1), .data = {.train = numbers()}, .loss = absolute}),
              HasSubstr("a configuration that names a model or data, beside a program's own"));
  TrainConfig with_loss = quiet();
  with_loss.loss = "squared_error";
  EXPECT_THAT(error_of(with_loss, {.model = nn::factory<Net>(1), .data = {.train = numbers()}, .loss = absolute}),
              HasSubstr("a configuration that names a loss"));
  EXPECT_THAT(
      error_of(quiet(), {.model = nn::factory<Net>(1), .data = {.train = numbers()}, .loss = absolute, .name = "mlp"}),
      HasSubstr("a second model named 'mlp' → choose another name"));
  EXPECT_THAT(
      error_of(quiet(),
               {.model = nn::factory<Net>(1), .data = {.train = numbers()}, .loss = absolute, .name = "my net"}),
      HasSubstr("a model named 'my net' → use letters"));
}

TEST(OwnTraining, ShapesThatDoNotFit) {
  EXPECT_THAT(
      error_of(quiet(), {.model = nn::factory<Net>(3), .data = {.train = numbers({2})}, .loss = absolute}),
      HasSubstr("sub of [32, 3] and [32, 2] → counted from the last axis, extents are equal, or one of them is 1"));
}

// Before it takes memory, a run is walked on tensors that have shapes alone.
TEST(OwnTraining, AModelThatLooksAtNumbers) {
  const OwnTraining own = {.model = nn::factory<LooksAtNumbers>(), .data = {.train = numbers()}, .loss = absolute};
  EXPECT_THAT(error_of(quiet(), own), HasSubstr("looks at numbers, and is run on shapes alone"));
  TrainConfig config = quiet();
  config.estimate_memory = false;
  EXPECT_EQ(train(config, own), 0);
}

TEST(OwnTraining, ADataSetThatDoesNotReadItsTargets) {
  class Lazy final : public data::Dataset {
   public:
    Lazy() : Dataset({.name = "lazy", .size = 4, .dims = {2}, .target_dims = {1}, .numeric_targets = true}) {}
  };
  EXPECT_THAT(
      error_of(quiet(), {.model = nn::factory<Net>(1), .data = {.train = std::make_shared<Lazy>()}, .loss = absolute}),
      HasSubstr("the data set 'lazy' does not say how its samples are read → override read_sample"));
}

TEST(Registries, FamiliesOfAProgram) {
  const auto build = [](nn::Context& context, const nn::ModelSpec& spec) -> std::unique_ptr<nn::Module> {
    return std::make_unique<Net>(context, spec.settings.integer("outputs"));
  };
  nn::register_model({.variants = {{.name = "netlet"}},
                      .settings = {nn::size_setting("outputs", 2, "numbers that come out")},
                      .any_samples = true,
                      .build = build});
  EXPECT_EQ(nn::model_family("netlet").settings.size(), 1U);
  data::register_dataset(
      {.name = "points", .about = "forty of them", .open = [](const auto&, const auto&, const auto&) {
         return data::DataSplits{.train = numbers({2}), .validation = numbers({2})};
       }});
  TrainConfig config = quiet();
  config.model = {.name = "netlet", .settings = {{"outputs", 2}}};
  config.data = "points";
  config.loss = "squared_error";
  EXPECT_EQ(train(config), 0);
  EXPECT_THROW(nn::register_model({.variants = {{.name = "cnn"}}, .build = build}), UsageError);
  EXPECT_THROW(nn::register_model({.variants = {{.name = "nothing"}}}), UsageError);
  EXPECT_THROW(
      data::register_dataset(
          {.name = "digits", .open = [](const auto&, const auto&, const auto&) { return data::DataSplits(); }}),
      UsageError);
}

class OwnEvaluation : public ::testing::Test {
 protected:
  const std::unique_ptr<comm::ProcessGroup> group = comm::make_group();
  const std::unique_ptr<nn::Backend> backend = nn::make_cpu_backend(1);
  nn::Generator generator{1};
  nn::Context context{*backend, generator};
  Net net{context, 1};
};

TEST_F(OwnEvaluation, OutputsAreThoseOfTheLastRun) {
  const auto data = numbers();
  Evaluator evaluator(*group, *backend, data, 8, 0, DType::kF32, nn::make_loss(nn::loss_family("squared_error")));
  evaluator.measure();
  evaluator.keep_outputs();
  for (int i = 0; i < 2; ++i) {
    const EvalReport report = evaluator.run(net, 1);
    ASSERT_EQ(evaluator.outputs().outputs.size(), 40u);
    ASSERT_EQ(evaluator.outputs().targets.size(), 40u);
    double squares = 0;
    for (std::size_t at = 0; at < 40; ++at) {
      const double error = double{evaluator.outputs().outputs[at]} - double{evaluator.outputs().targets[at]};
      squares += error * error / 40;
    }
    EXPECT_NEAR(report.errors.value().rmse, std::sqrt(squares), 1e-6);
    EXPECT_NEAR(report.loss, squares, 1e-5);
  }
  group->shutdown();
}

// Of an evaluation that ends by what the module, the data or the loss throws.
TEST_F(OwnEvaluation, ModeOfAModuleIsRestored) {
  bool throws = true;
  const nn::LossFunction loss = [&](nn::Tape& tape, const nn::Vars& y, const nn::Tensor& targets, float scale) {
    if (throws) throw UsageError("no loss today");
    return nn::squared_error(tape, y[0], targets, scale);
  };
  Evaluator evaluator(*group, *backend, numbers(), 8, 0, DType::kF32, loss);
  for (const bool training : {true, false}) {
    net.train(training);
    throws = true;
    EXPECT_THROW(evaluator.run(net, 1), UsageError);
    EXPECT_EQ(net.training(), training);
    throws = false;
    EXPECT_EQ(evaluator.run(net, 1).samples, 40);
    EXPECT_EQ(net.training(), training);
  }
  net.fuse();
  EXPECT_EQ(evaluator.run(net, 1).samples, 40);
  EXPECT_THROW(Evaluator(*group, *backend, nullptr, 8, 0).run(net, 1), UsageError);
  EXPECT_THROW(Evaluator(*group, *backend, numbers(), 0, 0).run(net, 1), UsageError);
  group->shutdown();
}

}  // namespace
}  // namespace lockstep::trainer
