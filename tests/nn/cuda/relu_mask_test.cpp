// A ReLU's result as input of several operators: some apply its mask to the gradient that they return, some do not.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "lockstep/nn/layers/layers.h"
#include "tests/nn/uploads.h"

namespace lockstep::nn {
namespace {

using testing::download;
using testing::upload;

constexpr std::int64_t kSamples = 9, kIn = 7, kHidden = 20;

std::vector<float> some(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  Generator(seed).uniform(values, -1.0, 1.0);
  return values;
}

// Gradients of the first layer's weight and bias and of the input. `readers`: linear layers that read the ReLU's
// result; `bare`: whether an addition reads it too.
std::array<std::vector<float>, 3> gradients(Backend& backend, int readers, bool bare) {
  Generator generator(5);
  Context context{backend, generator};
  Linear first(context, kIn, kHidden);
  std::vector<std::unique_ptr<Linear>> next;
  for (int i = 0; i < readers; ++i) next.push_back(std::make_unique<Linear>(context, kHidden, kHidden));
  Tape tape(backend);
  const Var x = tape.differentiable_input(upload(backend, {kSamples, kIn}, some(kSamples * kIn, 1)));
  const Var h = first.forward(tape, x, Epilogue::kRelu);
  Var y = bare ? h : next[0]->forward(tape, h);
  for (int i = bare ? 0 : 1; i < readers; ++i) y = add(tape, y, next[static_cast<std::size_t>(i)]->forward(tape, h));
  const Tensor target = upload(backend, {kSamples, kHidden}, some(kSamples * kHidden, 2));
  tape.backward(squared_error(tape, y, target, 0.5f).value);
  const auto parameters = first.named_parameters();
  return {download(backend, parameters[0].parameter->gradient()),
          download(backend, parameters[1].parameter->gradient()), download(backend, tape.grad(x))};
}

TEST(CudaReluMask, GradientsAreTheCpus) {
  const auto cpu = make_cpu_backend(1);
  const auto cuda = make_cuda_backend({});
  for (const bool bare : {false, true})
    for (const int readers : {0, 1, 2, 3}) {
      if (readers == 0 && !bare) continue;
      const auto wanted = gradients(*cpu, readers, bare), got = gradients(*cuda, readers, bare);
      for (std::size_t which = 0; which < wanted.size(); ++which) {
        ASSERT_EQ(got[which].size(), wanted[which].size());
        float largest = 0;
        for (const float value : wanted[which]) largest = std::max(largest, std::abs(value));
        for (std::size_t i = 0; i < wanted[which].size(); ++i)
          ASSERT_NEAR(got[which][i], wanted[which][i], 1e-5f * largest) << readers << " readers, gradient " << which;
      }
    }
}

}  // namespace
}  // namespace lockstep::nn
