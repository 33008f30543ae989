// MobileNetV2's tensors and sizes are torchvision's. Its values are compared by tests/parity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "nn/ops/meta_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using ::testing::HasSubstr;

class MobileNetV2 : public ::testing::Test {
 protected:
  std::unique_ptr<Module> model(std::vector<std::int64_t> shape, const Settings& settings = {}) {
    return make_model(
        context_, {.name = "mobilenet-v2", .sample_shape = std::move(shape), .classes = 1000, .settings = settings});
  }

 private:
  const std::unique_ptr<Backend> backend_ = make_cpu_backend(1), shapes_ = make_meta_backend(*backend_);
  Generator generator_ = Generator::none();
  Context context_{*shapes_, generator_};
};

std::int64_t parameters_of(const Module& module) {
  std::int64_t count = 0;
  for (const auto& [name, parameter] : module.named_parameters()) count += parameter->value().count();
  return count;
}

TEST_F(MobileNetV2, HasTorchvisionsTensors) {
  const auto made = model({224, 224, 3});
  std::vector<std::string> expected, names;
  const auto norm = [&](const std::string& name) {
    for (const char* what : {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
      expected.push_back(name + "." + what);
  };
  const auto activated = [&](const std::string& name) {
    expected.push_back(name + ".0.weight");
    norm(name + ".1");
  };
  activated("features.0");
  for (int block = 1; block < 18; ++block) {
    const std::string conv = fmt::format("features.{}.conv.", block);
    int layer = 0;
    if (block > 1) activated(conv + std::to_string(layer++));
    activated(conv + std::to_string(layer++));
    expected.push_back(conv + std::to_string(layer++) + ".weight");
    norm(conv + std::to_string(layer));
  }
  activated("features.18");
  for (const char* what : {"weight", "bias"}) expected.push_back(std::string("classifier.1.") + what);
  for (const auto& entry : made->named_parameters()) names.push_back(entry.name);
  for (const auto& entry : made->named_buffers()) names.push_back(entry.name);
  EXPECT_EQ(names.size(), 314u);
  EXPECT_EQ(std::set(names.begin(), names.end()), std::set(expected.begin(), expected.end()));
  EXPECT_EQ(parameters_of(*made), 3'504'872);
  EXPECT_THAT(to_string(*made),
              HasSubstr("(1): InvertedResidual(\n      (conv): Sequential(\n        (0): Sequential(\n"
                        "          (0): Conv2d(32, 32, kernel_size=(3, 3), stride=(1, 1), "
                        "padding=(1, 1), groups=32, bias=False)\n"));
  EXPECT_THAT(to_string(*made), HasSubstr("(0): Dropout(p=0.2, inplace=False)"));
  EXPECT_EQ(made->blocks().size(), 17u);
}

// torchvision's mobilenet_v2(width_mult=…).
TEST_F(MobileNetV2, HasWidthsByAMultiplier) {
  for (const auto& [multiplier, parameters] :
       {std::pair{0.35, 1'677'128}, {0.5, 1'968'680}, {0.75, 2'636'424}, {1.4, 6'108'776}})
    EXPECT_EQ(parameters_of(*model({224, 224, 3}, {{"width-multiplier", multiplier}})), parameters) << multiplier;
}

// Those that are published are known by a file's shapes.
TEST_F(MobileNetV2, IsKnownByItsWeights) {
  for (const double multiplier : {0.35, 0.5, 0.75, 1.0, 1.4}) {
    const auto made = model({96, 96, 1}, {{"width-multiplier", multiplier}});
    std::vector<HostTensor> tensors;
    for (const auto& [name, parameter] : made->named_parameters()) {
      HostTensor tensor;
      tensor.name = name;
      const Shape& s = parameter->value().shape();
      tensor.shape = s.size() == 4 ? std::vector<std::int64_t>{s[0], s[3], s[1], s[2]}
                                   : std::vector<std::int64_t>(s.dims().begin(), s.dims().end());
      tensors.push_back(std::move(tensor));
    }
    const ModelSpec spec = spec_of_tensors("mobilenet-v2", {}, tensors);
    EXPECT_EQ(spec.settings.number("width-multiplier"), multiplier);
    EXPECT_EQ(spec.classes, 1000);
    EXPECT_EQ(spec.sample_shape, (std::vector<std::int64_t>{224, 224, 1}));
  }
}

TEST_F(MobileNetV2, RefusesSmallImagesAndOddMultipliers) {
  EXPECT_THROW(model({31, 32, 3}), UsageError);
  EXPECT_NO_THROW(model({32, 33, 1}));
  for (const double multiplier : {0.0, -1.0, 17.0})
    EXPECT_THROW(model({32, 32, 3}, {{"width-multiplier", multiplier}}), UsageError);
}

// Those of all convolutions, one pixel after the other: torchvision counts 300,774,272 for 224 × 224.
TEST_F(MobileNetV2, CountsItsProducts) {
  double products = 0;
  for (const MatrixProduct& p : products_of({.name = "mobilenet-v2", .sample_shape = {224, 224, 3}, .classes = 1000}))
    products += static_cast<double>(p.rows) * static_cast<double>(p.in) * static_cast<double>(p.out);
  EXPECT_EQ(products, 300'774'272.0);
}

}  // namespace
}  // namespace lockstep::nn
