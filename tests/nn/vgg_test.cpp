// VGG-11 against a plain loop in f64 over the tensors of its weights file, which have torchvision's names and layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "nn/ops/meta_backend.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST(Vgg11, HasTorchvisionsParameters) {
  const auto backend = make_cpu_backend(1);
  const auto shapes = make_meta_backend(*backend);
  Generator generator = Generator::none();
  Context context{*shapes, generator};
  const auto model = make_model(context, {.name = "vgg11", .sample_shape = {224, 224, 3}, .classes = 1000});
  std::int64_t count = 0;
  std::vector<std::string> names;
  for (const auto& [name, parameter] : model->named_parameters()) {
    count += parameter->value().count();
    names.push_back(name);
  }
  EXPECT_EQ(count, 132'863'336);
  std::vector<std::string> expected;
  for (const int layer : {0, 3, 6, 8, 11, 13, 16, 18})
    for (const char* what : {"weight", "bias"}) expected.push_back(fmt::format("features.{}.{}", layer, what));
  for (const int layer : {0, 3, 6})
    for (const char* what : {"weight", "bias"}) expected.push_back(fmt::format("classifier.{}.{}", layer, what));
  EXPECT_EQ(names, expected);
  EXPECT_THAT(to_string(*model), ::testing::HasSubstr("(avgpool): AdaptiveAvgPool2d(output_size=(7, 7))"));
  EXPECT_THAT(to_string(*model), ::testing::HasSubstr("(5): Dropout(p=0.5, inplace=False)"));
}

TEST(Vgg11, RefusesImagesThatPoolingLeavesNothingOf) {
  const auto backend = make_cpu_backend(1);
  const auto shapes = make_meta_backend(*backend);
  Generator generator = Generator::none();
  Context context{*shapes, generator};
  EXPECT_THROW(make_model(context, {.name = "vgg11", .sample_shape = {31, 32, 3}}), UsageError);
  EXPECT_NO_THROW(make_model(context, {.name = "vgg11", .sample_shape = {32, 32, 1}}));
}

// Channels, rows, columns.
struct Image {
  std::int64_t c = 0, h = 0, w = 0;
  std::vector<double> values = std::vector<double>(static_cast<std::size_t>(c * h * w));

  double& at(std::int64_t channel, std::int64_t row, std::int64_t column) {
    return values[static_cast<std::size_t>((channel * h + row) * w + column)];
  }
};

class Vgg11Values : public ::testing::Test {
 protected:
  Vgg11Values() {
    Generator zeros = Generator::zeros();
    Context context{*backend, zeros};
    model = make_model(context, {.name = "vgg11", .sample_shape = {32, 32, 3}});
    std::uint32_t bits = 1;
    for (const auto& [name, parameter] : model->named_parameters()) {
      const Shape& shape = parameter->value().shape();
      const bool bias = shape.size() == 1;
      const double fan_in = static_cast<double>(shape.count()) / static_cast<double>(shape[0]);
      const auto scale = static_cast<float>(bias ? 0.1 : std::sqrt(6.0 / fan_in));
      for (float& value : parameter->value().span<float>()) {
        bits = bits * 1664525u + 1013904223u;
        value = scale * (static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f);
      }
      parameter->changed();
    }
    for (auto& tensor : state_of(*model)) state.emplace(tensor.name, std::move(tensor));
    model->train(false);
  }

  std::span<const float> tensor(const std::string& name) const {
    const auto& bytes = state.at(name).bytes;
    return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
  }

  Image convolved(Image x, const std::string& layer) const {
    const auto weight = tensor(layer + ".weight"), bias = tensor(layer + ".bias");
    Image y{.c = static_cast<std::int64_t>(bias.size()), .h = x.h, .w = x.w};
    for (std::int64_t o = 0; o < y.c; ++o) {
      for (std::int64_t r = 0; r < y.h; ++r)
        for (std::int64_t q = 0; q < y.w; ++q) y.at(o, r, q) = static_cast<double>(bias[static_cast<std::size_t>(o)]);
      for (std::int64_t c = 0; c < x.c; ++c)
        for (std::int64_t a = 0; a < 3; ++a)
          for (std::int64_t b = 0; b < 3; ++b) {
            const auto w = static_cast<double>(weight[static_cast<std::size_t>(((o * x.c + c) * 3 + a) * 3 + b)]);
            for (std::int64_t r = std::max<std::int64_t>(0, 1 - a); r < std::min(x.h, x.h + 1 - a); ++r)
              for (std::int64_t q = std::max<std::int64_t>(0, 1 - b); q < std::min(x.w, x.w + 1 - b); ++q)
                y.at(o, r, q) += w * x.at(c, r + a - 1, q + b - 1);
          }
    }
    for (double& value : y.values) value = std::max(value, 0.0);
    return y;
  }

  static Image pooled(Image x) {
    Image y{.c = x.c, .h = x.h / 2, .w = x.w / 2};
    for (std::int64_t c = 0; c < y.c; ++c)
      for (std::int64_t r = 0; r < y.h; ++r)
        for (std::int64_t q = 0; q < y.w; ++q)
          y.at(c, r, q) = std::max({x.at(c, 2 * r, 2 * q), x.at(c, 2 * r, 2 * q + 1), x.at(c, 2 * r + 1, 2 * q),
                                    x.at(c, 2 * r + 1, 2 * q + 1)});
    return y;
  }

  static Image averaged(Image x) {
    Image y{.c = x.c, .h = 7, .w = 7};
    for (std::int64_t c = 0; c < y.c; ++c)
      for (std::int64_t r = 0; r < 7; ++r)
        for (std::int64_t q = 0; q < 7; ++q) {
          double sum = 0, count = 0;
          for (std::int64_t a = r * x.h / 7; a < (r * x.h + x.h + 6) / 7; ++a)
            for (std::int64_t b = q * x.w / 7; b < (q * x.w + x.w + 6) / 7; ++b, ++count) sum += x.at(c, a, b);
          y.at(c, r, q) = sum / count;
        }
    return y;
  }

  std::vector<double> connected(const std::vector<double>& x, const std::string& layer, bool relu) const {
    const auto weight = tensor(layer + ".weight"), bias = tensor(layer + ".bias");
    std::vector<double> y;
    for (std::size_t o = 0; o < bias.size(); ++o) {
      double sum = static_cast<double>(bias[o]);
      for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(weight[o * x.size() + i]) * x[i];
      y.push_back(relu ? std::max(sum, 0.0) : sum);
    }
    return y;
  }

  std::vector<double> expected(Image x) const {
    for (const int layer : {0, 3, 6, 8, 11, 13, 16, 18}) {
      x = convolved(x, fmt::format("features.{}", layer));
      if (layer != 6 && layer != 11 && layer != 16) x = pooled(x);
    }
    std::vector<double> y = averaged(x).values;
    for (const int layer : {0, 3, 6}) y = connected(y, fmt::format("classifier.{}", layer), layer != 6);
    return y;
  }

  const std::unique_ptr<Backend> backend = make_cpu_backend(2);
  std::unique_ptr<Module> model;
  std::map<std::string, HostTensor> state;
};

// 32 × 32 leaves one pixel for all of 7 × 7; 96 × 70 leaves 3 × 2.
TEST_F(Vgg11Values, OfSmallImages) {
  for (const auto& [height, width] : {std::pair<std::int64_t, std::int64_t>{32, 32}, {96, 70}}) {
    const Tensor x = random_tensor(*backend, {1, height, width, 3}, 5);
    Image image{.c = 3, .h = height, .w = width};
    for (std::int64_t r = 0; r < height; ++r)
      for (std::int64_t q = 0; q < width; ++q)
        for (std::int64_t c = 0; c < 3; ++c) image.at(c, r, q) = static_cast<double>(x.f32()[(r * width + q) * 3 + c]);
    Tape tape(*backend);
    tape.set_recording(false);
    const Var y = model->forward(tape, tape.input(x));
    const auto wanted = expected(image);
    double largest = 0;
    for (const double value : wanted) largest = std::max(largest, std::abs(value));
    EXPECT_GT(largest, 0.01);
    ASSERT_EQ(y.value().count(), static_cast<std::int64_t>(wanted.size()));
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_NEAR(static_cast<double>(y.value().f32()[i]), wanted[i], 1e-5 * largest) << height << " x " << width;
  }
}

}  // namespace
}  // namespace lockstep::nn
