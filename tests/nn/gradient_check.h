// Numerical gradient check: central differences against the tape, on any device.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/autograd/functions.h"
#include "tests/nn/gradient_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

/// Sum of r · y as the end of a tape: its gradient is r.
class ProjectionNode final : public Node {
 public:
  ProjectionNode(Var output, Var y, Tensor r) : Node(output), y_(y), r_(std::move(r)) {}
  void backward(Tape& tape) override { tape.contribute(y_, r_); }

 private:
  Var y_;
  Tensor r_;
};

/// Ends a tape with sum(r · y), which is not computed.
inline Var project(Tape& tape, Var y, const Tensor& r) {
  const Var end = tape.make_loss(tape.backend().empty({}), y.needs_grad());
  tape.record<ProjectionNode>(end, y, r);
  return end;
}

/// What an operator is differentiated by.
struct Differentiated {
  std::vector<Tensor> inputs;
  std::vector<Parameter*> parameters;
  // The kernels compute in f32. With this step the rounding of y (1e-7) and the curvature (step²) both stay below
  // the tolerance; inputs keep further from kinks than the step moves them.
  double step = 0.01;
  double tolerance = 2e-3;  // of the largest gradient element, at least of 1
};

using Inputs = std::span<const Var>;
using Function = std::function<Var(Tape&, Inputs)>;
using Objective = std::function<double(const Var&)>;

inline void expect_same_gradient(Backend& backend, const std::string& what, const Differentiated& by, const Tensor& x,
                                 const Tensor& gradient, const std::function<double()>& objective) {
  ASSERT_TRUE(gradient.defined()) << what;
  ASSERT_EQ(gradient.shape(), x.shape()) << what;
  const auto computed = values_of(backend, gradient);
  auto values = values_of(backend, x);
  double largest = 1.0;
  for (const float g : computed) largest = std::max(largest, std::abs(static_cast<double>(g)));
  const auto objective_at = [&](std::size_t i, float value) {
    const float old = std::exchange(values[i], value);
    backend.upload(std::as_bytes(std::span(values)), x);
    values[i] = old;
    return objective();
  };
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float up = values[i] + static_cast<float>(by.step), down = values[i] - static_cast<float>(by.step);
    const double high = objective_at(i, up), low = objective_at(i, down);
    ASSERT_NEAR(static_cast<double>(computed[i]), (high - low) / (static_cast<double>(up) - static_cast<double>(down)),
                by.tolerance * largest)
        << what << " element " << i << " of " << to_string(x.shape());
  }
  backend.upload(std::as_bytes(std::span(values)), x);
}

/// `end` makes a loss (a root for backward) of what `op` returns, `objective` its value in f64.
inline void expect_gradients(Backend& backend, const Differentiated& by, const Function& op,
                             const std::function<Var(Tape&, Var)>& end, const Objective& objective) {
  const auto run = [&](bool with_backward, std::vector<Tensor>* input_gradients) {
    for (Parameter* parameter : by.parameters) parameter->changed();  // the check moves their values
    Tape tape(backend);
    std::vector<Var> inputs;
    for (const Tensor& input : by.inputs) inputs.push_back(tape.differentiable_input(input));
    const Var y = op(tape, inputs);
    const double value = objective(y);
    if (with_backward) {
      tape.backward(end(tape, y));
      for (const Var& input : inputs) input_gradients->push_back(tape.grad(input));
    }
    return value;
  };
  for (Parameter* parameter : by.parameters) parameter->clear_grad();
  std::vector<Tensor> input_gradients;
  run(true, &input_gradients);
  const auto value = [&] { return run(false, nullptr); };
  for (std::size_t i = 0; i < by.inputs.size(); ++i)
    expect_same_gradient(backend, "input " + std::to_string(i), by, by.inputs[i], input_gradients[i], value);
  for (std::size_t i = 0; i < by.parameters.size(); ++i) {
    const Parameter& parameter = *by.parameters[i];
    if (!parameter.requires_grad()) {
      EXPECT_FALSE(parameter.has_gradient()) << "parameter " << i << " is frozen";
      continue;
    }
    expect_same_gradient(backend, "parameter " + std::to_string(i), by, parameter.value(), parameter.gradient(), value);
  }
}

/// For operators: a random projection of the output, summed in f64.
inline void expect_gradients(Backend& backend, const Differentiated& by, const Function& op) {
  Tensor r;
  const auto projection_for = [&](const Var& y) {
    if (!r.defined()) r = random_tensor(backend, y.shape(), 4711);
    return r;
  };
  expect_gradients(
      backend, by, op, [&](Tape& tape, Var y) { return project(tape, y, projection_for(y)); },
      [&](const Var& y) {
        const auto weights = values_of(backend, projection_for(y)), values = values_of(backend, y.value());
        double sum = 0;
        for (std::size_t i = 0; i < values.size(); ++i)
          sum += static_cast<double>(weights[i]) * static_cast<double>(values[i]);
        return sum;
      });
}

/// For losses: `op` returns the loss's value, which was made with `scale`.
inline void expect_loss_gradients(Backend& backend, const Differentiated& by, double scale, const Function& op) {
  expect_gradients(
      backend, by, op, [](Tape&, Var loss) { return loss; },
      [&](const Var& loss) { return scale * static_cast<double>(values_of(backend, loss.value())[0]); });
}

/// Of one operator each, on the device of make_gradient_backend().
class Gradient : public ::testing::Test {
 protected:
  std::unique_ptr<Parameter> parameter(const Tensor& value) {
    auto made = std::make_unique<Parameter>(*backend, value.shape());
    backend->pointwise().copy(value, made->value());
    return made;
  }
  Tensor random(const Shape& shape, std::uint64_t seed) { return random_tensor(*backend, shape, seed); }
  std::unique_ptr<Parameter> weights(const Shape& shape, std::uint64_t seed) { return parameter(random(shape, seed)); }
  void expect_gradients(const Differentiated& by, const Function& op) { testing::expect_gradients(*backend, by, op); }
  void expect_loss_gradients(const Differentiated& by, double scale, const Function& op) {
    testing::expect_loss_gradients(*backend, by, scale, op);
  }

  std::unique_ptr<Backend> backend = make_gradient_backend();
};

}  // namespace lockstep::nn::testing
