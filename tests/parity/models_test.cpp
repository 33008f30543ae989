// Three steps of training, against the same models of torchvision, Hugging Face and PyTorch (make_models.py).
#include "lockstep/nn/models/models.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <numeric>

#include "lockstep/nn/io/state.h"
#include "lockstep/nn/optim/optimizer.h"
#include "tests/nn/gradient_backend.h"
#include "tests/parity/counter.h"
#include "tests/parity/golden.h"

namespace lockstep::parity {
namespace {

constexpr int kModelSteps = 3;

// MODELS in make_models.py.
struct Example {
  nn::ModelSpec spec;
  std::vector<std::int64_t> input;  // as PyTorch has it
  std::int64_t labels = 0;          // of a batch
  double norm_bias = 0.0;
  double lr = 1e-3;
  bool tokens = false;
  const char* golden = nullptr;  // of a model with other settings than its name has; nullptr: its name

  std::string name() const { return golden != nullptr ? golden : spec.name; }
};

std::ostream& operator<<(std::ostream& out, const Example& example) { return out << example.name(); }

struct Rule {
  const char* name;
  double rates;  // of the model's
  std::unique_ptr<nn::Optimizer> (*make)(std::vector<nn::NamedParameter> parameters);
};

const Rule kRules[] = {
    {"sgd", 20.0,
     [](auto all) { return nn::make_sgd(std::move(all), {.momentum = 0.9, .nesterov = true, .weight_decay = 0.01}); }},
    {"adamw", 1.0,
     [](auto all) {
       return nn::make_adamw(std::move(all), {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3, .weight_decay = 0.1});
     }},
};

class Models : public ::testing::TestWithParam<Example> {
 protected:
  Models() : example_(GetParam()), golden_(example_.name()), backend_(nn::testing::make_gradient_backend()) {
    case_ = example_.name() + "." + std::to_string(elements<std::int64_t>(golden_.extra("salt"))[0]);
  }

  std::unique_ptr<nn::Module> model() {
    nn::Generator generator = nn::Generator::zeros();
    nn::Context context{*backend_, generator};
    auto made = nn::make_model(context, example_.spec);
    fill(*made, case_, example_.norm_bias);
    return made;
  }

  nn::Var input(nn::Tape& tape, int step) {
    const std::string name = case_ + "/x/" + std::to_string(step);
    const std::int64_t count = count_of(example_.input);
    if (example_.tokens)
      return tape.input(upload(*backend_, below<std::int32_t>(name, count, example_.spec.classes),
                               nn::Shape(std::span(example_.input))));
    return tape.input(upload(*backend_, uniform(name, count), example_.input));
  }
  nn::Tensor labels(int step) {
    const auto values =
        below<std::int32_t>(case_ + "/labels/" + std::to_string(step), example_.labels, example_.spec.classes);
    return upload(*backend_, values,
                  example_.tokens ? nn::Shape(std::span(example_.input)) : nn::Shape{example_.labels});
  }

  float mean_loss(const nn::Loss& loss) {
    return download(*backend_, loss.totals())[0] / static_cast<float>(example_.labels);
  }

  // Of 50 layers no salt keeps all ReLUs' arguments further from 0 than f32 rounds (make_models.py), and which side one
  // takes differs between processors, in PyTorch too: no more than twice what three steps make of that is allowed. What
  // the file lacks is 0 but for rounding.
  void expect_gradients(const std::vector<nn::NamedParameter>& parameters) {
    const double tolerance = std::max(kGradients, 2 * elements<double>(golden_.extra("sgd/moved"))[0]);
    for (const auto& [name, parameter] : parameters) {
      const auto gradient = gradient_of(*backend_, *parameter);
      if (golden_.has("gradient/" + name)) {
        golden_.expect("gradient/" + name, gradient, tolerance);
        continue;
      }
      for (const float value : gradient) ASSERT_NEAR(value, 0.0f, 1e-6f) << name;
    }
  }

  // What moves is a difference of rounded numbers: each step rounds the larger one twice. A deep model amplifies what
  // the first step rounds; no more than twice what it makes of PyTorch's own steps in f32 is allowed. Running
  // statistics must also be within a share of themselves, whatever PyTorch makes of the rest.
  void expect_moved(const nn::Module& module, const std::string& rule) {
    const double tolerance = std::max(kGradients, 2 * elements<double>(golden_.extra(rule + "/moved"))[0]);
    for (const auto& tensor : nn::state_of(module)) {
      if (tensor.dtype == DType::kI64) {
        EXPECT_EQ(elements<std::int64_t>(tensor)[0], kModelSteps) << tensor.name;
        continue;
      }
      const auto before = initial(case_, tensor.name, tensor.shape, example_.norm_bias);
      const auto after = elements<float>(tensor);
      std::vector<float> moved(before.size());
      double largest = 0.0, furthest = 0.0;
      for (std::size_t i = 0; i < moved.size(); ++i) {
        moved[i] = after[i] - before[i];
        largest = std::max(largest, static_cast<double>(std::abs(after[i])));
        furthest = std::max(furthest, static_cast<double>(std::abs(moved[i])));
      }
      const bool statistic = tensor.name.ends_with("running_mean") || tensor.name.ends_with("running_var");
      const double within = statistic ? std::min(kGradients, kOutputs * largest / furthest) : tolerance;
      golden_.expect(rule + "/moved/" + tensor.name, moved, within, 2 * kModelSteps * 0x1p-24 * largest);
    }
  }

  void train(const Rule& rule) {
    const auto module = model();
    const auto parameters = module->named_parameters();
    const auto optimizer = rule.make(parameters);
    std::vector<std::size_t> all(parameters.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    nn::Tape tape(*backend_);
    const std::string name = rule.name;
    for (int step = 0; step < kModelSteps; ++step) {
      tape.reset();
      for (const auto& named : parameters) named.parameter->clear_grad();
      const nn::Var logits = module->forward(tape, input(tape, step));
      const nn::Tensor& output = logits.value();
      const auto loss = nn::cross_entropy(tape, logits, labels(step), 1.0f / static_cast<float>(example_.labels));
      golden_.expect(name + "/loss/" + std::to_string(step), std::array{mean_loss(loss)}, kOutputs);
      if (step == 0 && &rule == &kRules[0]) golden_.expect("output", download(*backend_, output), kOutputs);
      tape.backward(loss.value);
      if (step == 0 && &rule == &kRules[0]) expect_gradients(parameters);
      optimizer->begin_step(rule.rates * example_.lr);
      optimizer->update(all);
    }
    expect_moved(*module, name);
    module->train(false);
    tape.reset();
    tape.set_recording(false);
    golden_.expect(name + "/evaluated", download(*backend_, module->forward(tape, input(tape, 0)).value()), kOutputs);
  }

  const Example& example_;
  Golden golden_;
  std::unique_ptr<nn::Backend> backend_;
  std::string case_;
};

TEST_P(Models, TrainAsTheirOriginalsDo) {
  for (const Rule& rule : kRules) train(rule);
  EXPECT_EQ(golden_.not_compared(), std::vector<std::string>{});
  for (const char* kind : {"output", "loss", "gradient", "sgd/moved", "adamw/moved", "evaluated"})
    std::cout << kind << " " << golden_.worst(kind) << (std::string(kind) == "evaluated" ? "\n" : ", ");
}

nn::ModelSpec spec_of(const char* name, std::vector<std::int64_t> sample_shape, std::int64_t classes) {
  return {.name = name, .sample_shape = std::move(sample_shape), .classes = classes};
}
nn::ModelSpec tiny_gpt() {
  nn::ModelSpec spec = spec_of("gpt", {11}, 37);
  spec.settings = {{"layers", 2}, {"heads", 2}, {"width", 24}, {"context", 16}};
  return spec;
}

nn::ModelSpec tiny_vit() {
  nn::ModelSpec spec = spec_of("vit", {24, 24, 3}, 7);
  spec.settings = {{"layers", 2}, {"heads", 3}, {"width", 24}, {"patch", 8}};
  return spec;
}

nn::ModelSpec narrow_mobilenet() {
  nn::ModelSpec spec = spec_of("mobilenet-v2", {48, 48, 3}, 7);
  spec.settings = {{"width-multiplier", 0.35}, {"dropout", 0.0}};
  return spec;
}

nn::ModelSpec tiny_llama() {
  nn::ModelSpec spec = spec_of("llama", {11}, 37);
  spec.settings = {{"layers", 2}, {"heads", 4}, {"kv-heads", 2}, {"width", 24}, {"inner", 40}, {"context", 16}};
  return spec;
}

nn::ModelSpec recurrent(const char* name) {
  nn::ModelSpec spec = spec_of(name, {9}, 29);
  spec.settings = {{"layers", 2}, {"width", 16}};
  return spec;
}

nn::ModelSpec of_rows(const char* name) {
  nn::ModelSpec spec = spec_of(name, {6, 7, 1}, 5);
  spec.settings = {{"layers", 2}, {"width", 12}, {"bidirectional", true}};
  return spec;
}

INSTANTIATE_TEST_SUITE_P(All, Models,
                         ::testing::Values(Example{spec_of("linear", {5}, 10), {6, 5}, 6},
                                           Example{spec_of("mlp", {28, 28, 1}, 10), {4, 1, 28, 28}, 4},
                                           Example{spec_of("tabular", {16}, 10), {6, 16}, 6, 1.5},
                                           Example{spec_of("cnn", {28, 28, 1}, 10), {3, 1, 28, 28}, 3},
                                           Example{spec_of("resnet18", {48, 48, 3}, 7), {4, 3, 48, 48}, 4, 1.5},
                                           Example{spec_of("resnet50", {48, 48, 3}, 7), {3, 3, 48, 48}, 3, 3.0, 2e-5},
                                           Example{spec_of("resnet18-cifar", {16, 16, 3}, 10), {3, 3, 16, 16}, 3, 1.5},
                                           Example{narrow_mobilenet(), {4, 3, 48, 48}, 4, 3.0},
                                           Example{tiny_vit(), {3, 3, 24, 24}, 3},
                                           Example{tiny_gpt(), {2, 11}, 22, 0.0, 1e-3, true},
                                           Example{tiny_llama(), {2, 11}, 22, 0.0, 1e-3, true},
                                           Example{recurrent("rnn"), {3, 9}, 27, 0.0, 1e-3, true},
                                           Example{recurrent("lstm"), {3, 9}, 27, 0.0, 1e-3, true},
                                           Example{recurrent("gru"), {3, 9}, 27, 0.0, 1e-3, true},
                                           Example{of_rows("lstm"), {4, 1, 6, 7}, 4, 0.0, 1e-3, false, "lstm-rows"},
                                           Example{of_rows("gru"), {4, 1, 6, 7}, 4, 0.0, 1e-3, false, "gru-rows"}),
                         [](const auto& instance) {
                           std::string name = instance.param.name();
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace lockstep::parity
