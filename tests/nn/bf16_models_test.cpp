// Models in bf16 on the CPU: their loss and gradients near those of f32, parameters and gradients f32, and the same
// bits each time.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

struct Case {
  std::string model;
  Shape input;
  std::int64_t classes;
  Settings settings = {};
  int roundings = 8;  // of activations between input and loss, about
  int choices = 0;    // layers of ReLU and of maximum pooling
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.model; }

class Bf16Models : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!backend->computes_in(DType::kBF16)) GTEST_SKIP() << "no AVX-512: what refuses bf16 is tested in Bf16Refusal";
    Generator generator(1);
    Context context{*backend, generator};
    const Case& one = GetParam();
    ModelSpec spec;
    spec.name = one.model;
    spec.sample_shape = {one.input.dims().begin() + 1, one.input.dims().end()};
    spec.classes = one.classes;
    spec.settings = one.settings;
    model = make_model(context, spec);
    tokens = model_family(one.model).takes_tokens && one.input.size() == 2;
  }

  struct Result {
    double loss = 0;
    std::vector<std::vector<float>> gradients = {};
  };
  Result pass(DType activations) {
    const Case& one = GetParam();
    Tape tape(*backend);
    tape.set_activations(activations);
    const std::int64_t labels_of = tokens ? one.input.count() : one.input[0];
    const Tensor labels = backend->empty(tokens ? one.input : Shape{one.input[0]}, DType::kI32);
    for (std::int64_t i = 0; i < labels_of; ++i)
      labels.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % one.classes);
    const Var out = [&] {
      if (tokens) {
        const Tensor numbers = backend->empty(one.input, DType::kI32);
        for (std::int64_t i = 0; i < numbers.count(); ++i)
          numbers.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 5 % one.classes);
        return model->forward(tape, tape.input(numbers));
      }
      const Tensor x = testing::random_tensor(*backend, one.input, 3);
      const Tensor given = backend->empty(one.input, activations);
      backend->pointwise().cast(x, given);
      return model->forward(tape, tape.input(given));
    }();
    EXPECT_EQ(out.dtype(), activations);
    const Loss loss = cross_entropy(tape, out, labels, 1.0f / static_cast<float>(labels_of));
    for (const auto& named : model->named_parameters()) named.parameter->clear_grad();
    tape.backward(loss.value);
    Result made = {.loss = static_cast<double>(loss.totals().f32()[0]) / static_cast<double>(labels_of)};
    for (const auto& named : model->named_parameters()) {
      EXPECT_EQ(named.parameter->value().dtype(), DType::kF32);
      EXPECT_EQ(named.parameter->gradient().dtype(), DType::kF32);
      made.gradients.push_back(testing::values_of(named.parameter->gradient()));
    }
    return made;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(2);
  std::unique_ptr<Module> model;
  bool tokens = false;
};

double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

// Errors of activations are about 2⁻⁸ of them each time they are rounded, add up over layers, and are as many in
// backward as in forward. About 2⁻⁸ of the inputs of a ReLU, or of the differences of two operands of a maximum, are as
// near to 0 as that. There the gradient takes another way altogether.
TEST_P(Bf16Models, LossAndGradientsAreNearThoseOfF32) {
  const Result f32 = pass(DType::kF32), bf16 = pass(DType::kBF16);
  const double most = 2.0 * GetParam().roundings * 0x1p-8;
  EXPECT_NEAR(bf16.loss, f32.loss, most * f32.loss);
  double apart = 0, all = 0;
  for (std::size_t i = 0; i < f32.gradients.size(); ++i) {
    std::vector<float> difference = f32.gradients[i];
    for (std::size_t j = 0; j < difference.size(); ++j) difference[j] -= bf16.gradients[i][j];
    apart += std::pow(norm_of(difference), 2.0);
    all += std::pow(norm_of(f32.gradients[i]), 2.0);
  }
  EXPECT_LE(apart, (most * most + GetParam().choices * 0x1p-8) * all);
  EXPECT_GT(std::sqrt(apart), 0x1p-16 * std::sqrt(all)) << "nothing was computed in bf16";
}

TEST_P(Bf16Models, HasTheSameBitsEachTime) {
  const Result once = pass(DType::kBF16), again = pass(DType::kBF16);
  EXPECT_EQ(once.loss, again.loss);
  EXPECT_EQ(once.gradients, again.gradients);
}

INSTANTIATE_TEST_SUITE_P(
    All, Bf16Models,
    ::testing::Values(Case{"mlp", {7, 19}, 5, {{"hidden", std::vector<std::int64_t>{60, 40}}}, 6, 2},
                      Case{"cnn", {3, 12, 12, 3}, 10, {}, 8, 5}, Case{"resnet18-cifar", {8, 16, 16, 3}, 10, {}, 40, 17},
                      Case{"vit", {3, 8, 8, 3}, 10, {{"layers", 2}, {"heads", 2}, {"width", 32}}, 20},
                      Case{"gpt", {2, 17}, 23, {{"layers", 2}, {"heads", 2}, {"width", 32}, {"context", 17}}, 20},
                      Case{"llama", {2, 17}, 23, {{"layers", 2}, {"heads", 2}, {"width", 32}, {"context", 17}}, 40},
                      Case{"lstm", {3, 9, 8, 1}, 10, {{"width", 40}}, 12},
                      Case{"gru", {3, 9, 8, 1}, 10, {{"width", 40}}, 12}),
    [](const auto& one) {
      std::string name = one.param.model;
      std::erase(name, '-');
      return name;
    });

}  // namespace
}  // namespace lockstep::nn
