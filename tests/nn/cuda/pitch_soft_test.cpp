// Logits whose rows lie apart (Note [Pitch]) in whole models, with a vocabulary that fills no 16 bytes: against the
// CPU's, and counted by a cuBLASLt in software.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "tests/nn/values.h"
#include "tests/soft_cuda/libraries.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr std::int64_t kVocabulary = 65, kTokens = 6, kSamples = 3;

struct Pass {
  float loss = 0, correct = 0;
  std::vector<float> outputs;                 // empty: nobody has looked at them
  std::vector<std::vector<float>> gradients;  // of the parameters
};

class SoftPitch : public ::testing::TestWithParam<const char*> {
 protected:
  static ModelSpec spec(std::int64_t vocabulary = kVocabulary) {
    ModelSpec made = {.name = GetParam(), .sample_shape = {kTokens}, .classes = vocabulary};
    made.settings = made.name == "gpt" ? Settings{{"layers", 2}, {"heads", 2}, {"width", 16}, {"context", kTokens}}
                                       : Settings{{"layers", 1}, {"width", 16}};
    return made;
  }

  static Tensor numbers(Backend& backend, std::int32_t from) {
    std::vector<std::int32_t> values(kSamples * kTokens);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = (static_cast<std::int32_t>(i) * 29 + from) % static_cast<std::int32_t>(kVocabulary);
    Tensor made = backend.empty({kSamples, kTokens}, DType::kI32);
    backend.upload(std::as_bytes(std::span(values)), made);
    return made;
  }

  /// `looks`: somebody reads the outputs before the loss does.
  static Pass run(Backend& backend, bool looks, DType activations = DType::kF32,
                  std::int64_t vocabulary = kVocabulary) {
    Generator generator(1);
    Context context{backend, generator};
    const auto model = make_model(context, spec(vocabulary));
    Tape tape(backend);
    tape.set_activations(activations);
    const Var outputs = model->forward(tape, tape.input(numbers(backend, 3)));
    Pass pass;
    if (looks) pass.outputs = values_of(backend, outputs.value());
    const Loss loss = cross_entropy(tape, outputs, numbers(backend, 11), 1.0f / (kSamples * kTokens));
    const auto totals = values_of(backend, loss.totals());
    pass.loss = totals[0];
    pass.correct = totals[1];
    tape.backward(loss.value);
    for (const auto& named : model->named_parameters())
      pass.gradients.push_back(values_of(backend, named.parameter->gradient()));
    return pass;
  }

  static void expect_near(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(a[i], b[i], 1e-5 + 1e-4 * std::abs(static_cast<double>(a[i]))) << i;
  }

  std::unique_ptr<Backend> cpu = make_cpu_backend(1), gpu = make_cuda_backend({});
};

TEST_P(SoftPitch, ModelsComputeWhatTheCpuDoes) {
  const Pass expected = run(*cpu, true);
  for (const bool looks : {false, true}) {
    const Pass got = run(*gpu, looks);
    EXPECT_NEAR(expected.loss, got.loss, 1e-3);
    EXPECT_EQ(expected.correct, got.correct);
    if (looks) expect_near(expected.outputs, got.outputs);
    ASSERT_EQ(expected.gradients.size(), got.gradients.size());
    for (std::size_t i = 0; i < got.gradients.size(); ++i) expect_near(expected.gradients[i], got.gradients[i]);
  }
}

// In bf16 the two round at the same places, but sum in other orders, which turns some roundings: as if a few numbers
// between input and loss were rounded once more.
TEST_P(SoftPitch, ModelsInBf16AreNearTheCpus) {
  if (!cpu->computes_in(DType::kBF16)) {
    EXPECT_EQ(cpu_bf16(), CpuBf16::kNone);
    EXPECT_THROW(run(*cpu, false, DType::kBF16), UsageError);
    return;
  }
  const Pass expected = run(*cpu, false, DType::kBF16), got = run(*gpu, false, DType::kBF16);
  constexpr double kMost = 4 * 0x1p-8;
  EXPECT_NEAR(expected.loss, got.loss, kMost * static_cast<double>(expected.loss));
  ASSERT_EQ(expected.gradients.size(), got.gradients.size());
  double apart = 0, all = 0;
  for (std::size_t i = 0; i < got.gradients.size(); ++i)
    for (std::size_t j = 0; j < got.gradients[i].size(); ++j) {
      const auto a = static_cast<double>(expected.gradients[i][j]), b = static_cast<double>(got.gradients[i][j]);
      apart += (a - b) * (a - b);
      all += a * a;
    }
  EXPECT_LE(std::sqrt(apart), kMost * std::sqrt(all));
  RecordProperty("relative_error", std::to_string(std::sqrt(apart / all)));
}

TEST_P(SoftPitch, EveryProductReadsAndWritesRowsAt16Bytes) {
  for (const DType activations : {DType::kF32, DType::kBF16}) {
    const auto before = soft_cuda::cublaslt_counts();
    run(*gpu, false, activations);
    const auto after = soft_cuda::cublaslt_counts();
    EXPECT_GT(after.products, before.products + 2);
    EXPECT_EQ(after.odd_pitches, before.odd_pitches) << name_of(activations);
  }
}

// Those to logits and back have the size of the pitch (Note [Zero rows]). The weight's gradient has as many rows as the
// weight: where they are many, all but a few are made by a product of a good size.
TEST_P(SoftPitch, ProductsHaveSizesThatFastKernelsTake) {
  for (const DType activations : {DType::kF32, DType::kBF16}) {
    auto before = soft_cuda::cublaslt_counts();
    run(*gpu, false, activations);
    EXPECT_EQ(soft_cuda::cublaslt_counts().odd_sizes, before.odd_sizes + 1) << name_of(activations);
    before = soft_cuda::cublaslt_counts();
    run(*gpu, false, activations, /*vocabulary=*/1091);
    const auto after = soft_cuda::cublaslt_counts();
    EXPECT_EQ(after.odd_sizes, before.odd_sizes + 1) << name_of(activations);
    EXPECT_LT(after.odd_multiplications - before.odd_multiplications,
              (after.multiplications - before.multiplications) * 0.03);
  }
}

// Nobody sees the rows of zeros: files are the CPU's, byte for byte; and nobody writes them.
TEST_P(SoftPitch, RowsOfZerosAreInMemoryAlone) {
  const lockstep::testing::TemporaryDirectory directory;
  const auto file_of = [&](Backend& backend, const char* name) {
    Generator generator(1);
    Context context{backend, generator};
    const auto model = make_model(context, spec());
    const std::string path = directory.path() / name;
    write_weights(path, state_of(*model));
    std::stringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    return content.str();
  };
  EXPECT_EQ(file_of(*gpu, "gpu.safetensors"), file_of(*cpu, "cpu.safetensors"));

  Generator generator(1);
  Context context{*gpu, generator};
  const auto model = make_model(context, spec());
  const auto parameters = model->named_parameters();
  const auto optimizer = make_optimizer("adamw", parameters, {}, 0.1);
  Tape tape(*gpu);
  tape.set_activations(DType::kBF16);
  for (int step = 0; step < 2; ++step) {
    optimizer->zero_grad();
    const Loss loss = cross_entropy(tape, model->forward(tape, tape.input(numbers(*gpu, 3))), numbers(*gpu, 11), 0.1f);
    tape.backward(loss.value);
    optimizer->step(0.01);
    tape.reset();
  }
  int padded = 0;
  for (const auto& named : parameters)
    for (const Tensor& value : {named.parameter->value(), named.parameter->as(DType::kBF16)}) {
      if (value.zero_rows() == 0) continue;
      ++padded;
      const std::int64_t count = value.count() / value.size(0) * value.zero_rows();
      const Tensor zeros =
          Tensor::view_of(static_cast<std::byte*>(value.raw()) + value.bytes(), {count}, value.dtype());
      Tensor f32 = gpu->empty({count});
      if (value.dtype() == DType::kF32)
        gpu->pointwise().copy(zeros, f32);
      else
        gpu->pointwise().cast(zeros, f32);
      EXPECT_EQ(values_of(*gpu, f32), std::vector<float>(static_cast<std::size_t>(count), 0.0f));
    }
  EXPECT_GT(padded, 1);
}

TEST_P(SoftPitch, OutputsThatSomebodyReadsAreContiguous) {
  Generator generator(1);
  Context context{*gpu, generator};
  const auto model = make_model(context, spec());
  Tape tape(*gpu);
  const Var outputs = model->forward(tape, tape.input(numbers(*gpu, 3)));
  EXPECT_EQ(outputs.shape(), (Shape{kSamples, kTokens, kVocabulary}));
  EXPECT_EQ(outputs.rows().pitch(), 68);
  EXPECT_THROW(static_cast<void>(outputs.rows().f32()), UsageError);
  // Two uses, one of which knows contiguous gradients alone.
  const Var doubled = add(tape, outputs, outputs);
  EXPECT_TRUE(doubled.rows().is_contiguous());
  EXPECT_TRUE(outputs.rows().is_contiguous());
}

TEST_P(SoftPitch, GradientsOfSeveralUsesAreAdded) {
  const auto gradients = [&](Backend& backend) {
    Generator generator(1);
    Context context{backend, generator};
    const auto model = make_model(context, spec());
    Tape tape(backend);
    const Var outputs = model->forward(tape, tape.input(numbers(backend, 3)));
    const Loss first = cross_entropy(tape, outputs, numbers(backend, 11), 0.1f);
    const Loss second = cross_entropy(tape, relu(tape, outputs), numbers(backend, 7), 0.1f);
    tape.backward(add(tape, first.value, second.value));
    std::vector<std::vector<float>> all;
    for (const auto& named : model->named_parameters()) all.push_back(values_of(backend, named.parameter->gradient()));
    return all;
  };
  const auto expected = gradients(*cpu), got = gradients(*gpu);
  for (std::size_t i = 0; i < got.size(); ++i) expect_near(expected[i], got[i]);
}

INSTANTIATE_TEST_SUITE_P(Models, SoftPitch, ::testing::Values("gpt", "lstm"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace lockstep::nn
