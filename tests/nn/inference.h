// Models to be evaluated, on the device of make_gradient_backend().
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "lockstep/nn/models/models.h"
#include "tests/nn/gradient_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

class Inference : public ::testing::Test {
 protected:
  std::unique_ptr<Module> model(const ModelSpec& spec, std::uint64_t seed = 1) {
    Generator generator(seed);
    Context context{*backend, generator};
    auto made = make_model(context, spec);
    // Normalisations that do something, and values that are no round numbers.
    std::uint64_t next = 100;
    for (const auto& named : made->named_parameters())
      if (named.parameter->value().shape().size() == 1) nudge(named.parameter->value(), 0.2f, ++next);
    for (const auto& named : made->named_buffers())
      if (named.tensor->dtype() == DType::kF32) nudge(*named.tensor, 0.3f, ++next);
    for (const auto& named : made->named_parameters()) named.parameter->changed();
    made->train(false);
    return made;
  }
  std::unique_ptr<Module> gpt(std::int64_t context = 12) {
    return model({.name = "gpt",
                  .sample_shape = {context},
                  .classes = 11,
                  .settings = {{"layers", 3}, {"heads", 2}, {"width", 16}, {"context", context}}});
  }
  std::unique_ptr<Module> llama() {
    return model({.name = "llama",
                  .sample_shape = {12},
                  .classes = 11,
                  .settings = {{"layers", 3}, {"heads", 4}, {"kv-heads", 2}, {"width", 16}, {"context", 12}}});
  }
  void nudge(const Tensor& tensor, float by, std::uint64_t seed) {
    auto values = values_of(*backend, tensor);
    const auto noise = values_of(*backend, random_tensor(*backend, tensor.shape(), seed));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += by * noise[i];
    backend->upload(std::as_bytes(std::span(values)), tensor);
  }
  static Tensor tokens_of(Backend& on, const Shape& shape, const std::vector<std::int32_t>& numbers) {
    Tensor made = on.empty(shape, DType::kI32);
    on.upload(std::as_bytes(std::span(numbers)), made);
    return made;
  }
  Tensor tokens_of(const Shape& shape, const std::vector<std::int32_t>& numbers) {
    return tokens_of(*backend, shape, numbers);
  }
  static std::vector<float> forward(Backend& on, Module& module, const Tensor& x) {
    Tape tape(on);
    tape.set_recording(false);
    return values_of(on, module.forward(tape, tape.input(x)).value());
  }
  static void expect_near(const std::vector<float>& a, const std::vector<float>& b, float tolerance = 1e-4f) {
    ASSERT_EQ(a.size(), b.size());
    float largest = 0, worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::abs(b[i]));
      worst = std::max(worst, std::abs(a[i] - b[i]));
    }
    EXPECT_GT(largest, 0);
    EXPECT_LE(worst, tolerance * largest);
  }
  static const LanguageModel& language(const std::unique_ptr<Module>& module) {
    return dynamic_cast<const LanguageModel&>(*module);
  }

  std::unique_ptr<Backend> backend = make_gradient_backend();
};

}  // namespace lockstep::nn::testing
