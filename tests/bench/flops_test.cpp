#include "bench/flops.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lockstep::bench {
namespace {

nn::ModelSpec spec_of(const std::string& name, std::vector<std::int64_t> shape) {
  return {.name = name, .sample_shape = std::move(shape)};
}

TEST(Flops, OfMlpAreCountedByHand) {
  // 784·1024 + 1024·1024 + 1024·10 multiply-adds; the first layer's twice, the others' three times, 2 operations each.
  const double once = 2.0 * (2 * 802816.0 + 3 * (1048576.0 + 10240.0));
  EXPECT_DOUBLE_EQ(flops_per_step(products_of(spec_of("mlp", {28, 28, 1})), 1), once);
  EXPECT_DOUBLE_EQ(flops_per_step(products_of(spec_of("mlp", {28, 28, 1})), 64), 64 * 9564160.0);
}

TEST(Flops, OfCnnAreCountedByHand) {
  // conv1 28·28·9·32, conv2 14·14·9·32·64, fc1 3136·128, fc2 128·10.
  const double once = 2.0 * (2 * 225792.0 + 3 * (3612672.0 + 401408.0 + 1280.0));
  EXPECT_DOUBLE_EQ(flops_per_step(products_of(spec_of("cnn", {28, 28, 1})), 1), once);
  EXPECT_DOUBLE_EQ(once, 24995328.0);
}

TEST(Flops, OfLinearHaveNoInputGradient) {
  auto spec = spec_of("linear", {5});
  spec.classes = 2;
  EXPECT_DOUBLE_EQ(flops_per_step(products_of(spec), 3), 3 * 2.0 * 2 * 5 * 2);
}

TEST(Flops, AreOfTheModelsThatThereAre) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*backend, generator};
  for (const auto& name : nn::model_names()) {
    for (const auto& shape : {std::vector<std::int64_t>{28, 28, 1}, {9, 14, 3}}) {
      auto spec = spec_of(name, shape);
      spec.hidden = {33, 17};
      std::int64_t weights = 0, counted = 0;
      for (const auto& [parameter, p] : nn::make_model(context, spec)->named_parameters())
        if (p->value().shape().size() >= 2) weights += p->value().count();
      for (const auto& product : products_of(spec)) counted += product.in * product.out;
      EXPECT_EQ(counted, weights) << name;
    }
  }
  EXPECT_THROW(products_of(spec_of("lstm", {5})), UsageError);
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
