// BERT against Hugging Face's (make_bert.py): samples of several lengths, two token types, 20 steps of training.
#include "nn/models/bert.h"

#include <gtest/gtest.h>

#include <array>
#include <iostream>

#include "lockstep/nn/io/state.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/nn/gradient_backend.h"
#include "tests/parity/counter.h"
#include "tests/parity/golden.h"

namespace lockstep::parity {
namespace {

constexpr std::int64_t kSamples = 3, kTokens = 11, kChosen = 4, kClasses = 3;
constexpr std::array<std::int32_t, kSamples> kLengths = {11, 7, 4};
constexpr int kSteps = 20;
constexpr double kRate = 0.02;
const nn::BertSpec kSpec = {
    .layers = 2, .heads = 2, .width = 24, .inner = 40, .context = 16, .vocabulary = 37, .token_types = 2};

// Of f32 against f64, after one pass: what the issue of parity promises for a forward pass.
constexpr double kForward = 1e-5;

// Hugging Face's has a gradient that is mere rounding: softmax does not change when all scores of a query do.
bool is_rounding(const std::string& name) { return name.ends_with("attention.self.key.bias"); }

class BertParity : public ::testing::Test {
 protected:
  BertParity() : backend_(nn::testing::make_gradient_backend()), context_{*backend_, generator_} {}

  nn::Tensor numbers(const std::string& name, const nn::Shape& shape, std::int64_t bound) {
    return upload(*backend_, below<std::int32_t>(name, shape.count(), bound), shape);
  }
  nn::Vars inputs(nn::Tape& tape, const std::string& name, int step) {
    const std::string number = "/" + std::to_string(step);
    return {tape.input(numbers(name + "/tokens" + number, {kSamples, kTokens}, kSpec.vocabulary)),
            tape.input(numbers(name + "/types" + number, {kSamples, kTokens}, 2)),
            tape.input(upload(*backend_, {kLengths.begin(), kLengths.end()}, nn::Shape{kSamples}))};
  }
  nn::Tensor positions(const std::string& name, int step) {
    auto all = below<std::int32_t>(name + "/positions/" + std::to_string(step), kSamples * kChosen, 1 << 20);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] %= kLengths[i / kChosen];
    return upload(*backend_, all, nn::Shape{kSamples, kChosen});
  }

  void train(nn::Module& module, const std::string& name, const nn::Shape& labels, std::int64_t classes) {
    Golden golden(name);
    fill(module, name);
    const auto parameters = module.named_parameters();
    const auto optimizer = nn::make_sgd(parameters, {.momentum = 0.9});
    nn::Tape tape(*backend_);
    for (int step = 0; step < kSteps; ++step) {
      tape.reset();
      optimizer->zero_grad();
      nn::Vars given = inputs(tape, name, step);
      if (labels.size() == 2) given.push_back(tape.input(positions(name, step)));
      const nn::Var logits = module(tape, given);
      const nn::Tensor output = logits.value();
      const nn::Loss loss =
          nn::cross_entropy(tape, logits, numbers(name + "/labels/" + std::to_string(step), labels, classes),
                            1.0f / static_cast<float>(labels.count()));
      golden.expect("loss/" + std::to_string(step),
                    std::array{download(*backend_, loss.totals())[0] / static_cast<float>(labels.count())},
                    step == 0 ? kForward : kOutputs);
      if (step == 0) golden.expect("output", download(*backend_, output), kForward);
      tape.backward(loss.value);
      for (const auto& [parameter_name, parameter] : parameters)
        if (step == 0 && !is_rounding(parameter_name))
          golden.expect("gradient/" + parameter_name, gradient_of(*backend_, *parameter), kGradients);
      optimizer->step(kRate);
    }
    for (const auto& tensor : nn::state_of(module)) {
      if (is_rounding(tensor.name)) continue;
      const auto before = initial(name, tensor.name, tensor.shape);
      const auto after = elements<float>(tensor);
      std::vector<float> moved(before.size());
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i] = after[i] - before[i];
      golden.expect("moved/" + tensor.name, moved, kGradients);
    }
    EXPECT_EQ(golden.not_compared(), std::vector<std::string>{});
    for (const char* kind : {"loss", "gradient", "moved"})
      std::cout << kind << " " << golden.worst(kind) << (std::string(kind) == "moved" ? "\n" : ", ");
  }

  std::unique_ptr<nn::Backend> backend_;
  nn::Generator generator_{1};
  nn::Context context_;
};

TEST_F(BertParity, PredictsMaskedTokens) {
  nn::BertForMaskedLM module(context_, kSpec);
  train(module, "bert-masked", {kSamples, kChosen}, kSpec.vocabulary);
}

TEST_F(BertParity, ClassifiesSequences) {
  nn::BertForSequenceClassification module(context_, kSpec, kClasses);
  train(module, "bert-classes", {kSamples}, kClasses);
}

}  // namespace
}  // namespace lockstep::parity
