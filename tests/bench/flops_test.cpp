#include "bench/flops.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "nn/ops/meta_backend.h"
#include "tests/support/models.h"

namespace lockstep::bench {
namespace {

nn::ModelSpec spec_of(const std::string& name, std::vector<std::int64_t> shape) {
  return {.name = name, .sample_shape = std::move(shape)};
}

TEST(Flops, OfMlpAreCountedByHand) {
  // 784·1024 + 1024·1024 + 1024·10 multiply-adds; the first layer's twice, the others' three times, 2 operations each.
  const double once = 2.0 * (2 * 802816.0 + 3 * (1048576.0 + 10240.0));
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec_of("mlp", {28, 28, 1})), 1), once);
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec_of("mlp", {28, 28, 1})), 64), 64 * 9564160.0);
}

TEST(Flops, OfCnnAreCountedByHand) {
  // conv1 28·28·9·32, conv2 14·14·9·32·64, fc1 3136·128, fc2 128·10.
  const double once = 2.0 * (2 * 225792.0 + 3 * (3612672.0 + 401408.0 + 1280.0));
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec_of("cnn", {28, 28, 1})), 1), once);
  EXPECT_DOUBLE_EQ(once, 24995328.0);
}

TEST(Flops, OfLinearHaveNoInputGradient) {
  auto spec = spec_of("linear", {5});
  spec.classes = 2;
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 3), 3 * 2.0 * 2 * 5 * 2);
}

// Multiply-adds of a forward pass, as they are published.
TEST(Flops, OfResNetsAreThosePublished) {
  for (const auto& [name, published] : {std::pair{"resnet18", 1.814e9}, std::pair{"resnet50", 4.089e9}}) {
    auto spec = spec_of(name, {224, 224, 3});
    spec.classes = 1000;
    double forward = 0;
    for (const auto& p : nn::products_of(spec)) forward += static_cast<double>(p.rows * p.in * p.out);
    EXPECT_NEAR(forward, published, 1e-3 * published) << name;
  }
}

TEST(Flops, OfGptAreCountedByHand) {
  auto spec = spec_of("gpt", {5});
  spec.settings = {{"layers", 3}, {"heads", 2}, {"width", 8}};
  spec.classes = 11;
  // Of a token 12 · 8² in each layer and 8 · 11 after them; of each of 15 pairs 2 · 8.
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 7), 7 * 6.0 * (3 * (5 * 768.0 + 15 * 16.0) + 5 * 88.0));
}

TEST(Flops, OfLlamaAreCountedByHand) {
  auto spec = spec_of("llama", {5});
  spec.settings = {{"layers", 3}, {"heads", 4}, {"kv-heads", 2}, {"width", 8}, {"inner", 10}};
  spec.classes = 11;
  // Of a token 2 · 8² + 2 · 4 · 8 + 3 · 8 · 10 in each layer and 8 · 11 after them; of each of 15 pairs 2 · 8.
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 7), 7 * 6.0 * (3 * (5 * 432.0 + 15 * 16.0) + 5 * 88.0));
}

TEST(Flops, OfLstmAreCountedByHand) {
  auto spec = spec_of("lstm", {5});
  spec.settings = {{"layers", 3}, {"width", 8}};
  spec.classes = 11;
  // Of a token 2 · 4 · 8² in each layer and 8 · 11 after them.
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 7), 7 * 6.0 * 5 * (3 * 512.0 + 88.0));
  // Of a row of 6 · 2 numbers, whose gradient nobody wants, 4 · 8 · 12; the last of four is decoded.
  spec.sample_shape = {4, 6, 2};
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 1), 4 * (4 * 384.0 + 6 * (256.0 + 2 * 512.0)) + 6 * 88.0);
}

TEST(Flops, OfRecurrentModelsFollowTheirGatesAndDirections) {
  auto spec = spec_of("gru", {4, 6, 2});
  spec.settings = {{"layers", 2}, {"width", 8}, {"bidirectional", true}};
  spec.classes = 11;
  // Each way: of a row of 6 · 2 numbers, whose gradient nobody wants, 3 · 8 · 12, then 3 · 8 · 16, and 3 · 8² each
  // time; 16 features are decoded.
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 1),
                   4 * 2 * (4 * 288.0 + 6 * (192.0 + 384.0 + 192.0)) + 6 * 176.0);
  spec = spec_of("rnn", {5});
  spec.settings = {{"layers", 3}, {"width", 8}};
  spec.classes = 11;
  EXPECT_DOUBLE_EQ(flops_per_step(nn::products_of(spec), 7), 7 * 6.0 * 5 * (3 * 128.0 + 88.0));
}

TEST(Flops, CoverAllModels) {
  const auto backend = nn::make_cpu_backend(1);
  const auto shapes = nn::make_meta_backend(*backend);
  nn::Generator generator = nn::Generator::none();
  nn::Context context{*shapes, generator};
  for (const auto& name : nn::model_names()) {
    const nn::ModelFamily& family = nn::model_family(name);
    for (const auto& shape : {std::vector<std::int64_t>{32, 32, 1}, {33, 47, 3}, {9}}) {
      if (shape.size() == 1 ? !family.takes_tokens : !family.takes_images) continue;
      auto spec = spec_of(name, shape);
      spec.settings = testing::settings_of(
          name, {{"hidden", {33, 17}}, {"layers", 3}, {"heads", 3}, {"width", 12}, {"context", 9}, {"patch", 1}});
      std::int64_t weights = 0, counted = 0;
      for (const auto& [parameter, p] : nn::make_model(context, spec)->named_parameters())
        if (p->value().shape().size() >= 2 && parameter != "wpe.weight" && parameter != "encoder.weight" &&
            parameter != "model.embed_tokens.weight" && parameter != "class_token" &&
            parameter != "encoder.pos_embedding" && !parameter.ends_with("position_embeddings.weight") &&
            !parameter.ends_with("token_type_embeddings.weight"))
          weights += p->value().count();
      for (const auto& product : nn::products_of(spec))
        if (product.out > 1) counted += product.in * product.out;  // attention has no weights
      EXPECT_EQ(counted, weights) << name;
    }
  }
  EXPECT_THROW(nn::products_of(spec_of("transformer", {5})), UsageError);
}

TEST(PeakTflops, IsKnownByTheNameOfTheGpu) {
  EXPECT_DOUBLE_EQ(peak_tflops("NVIDIA H100 80GB HBM3", "bf16").value(), 989.4);
  EXPECT_DOUBLE_EQ(peak_tflops("NVIDIA H200", "tf32").value(), 494.7);
  EXPECT_DOUBLE_EQ(peak_tflops("NVIDIA H100 PCIe", "bf16").value(), 756);
  EXPECT_FALSE(peak_tflops("Intel Xeon", "f32"));
  EXPECT_FALSE(peak_tflops("NVIDIA H200", "fp8"));
}

}  // namespace
}  // namespace lockstep::bench
