// RandAugment's operations against torchvision's on Pillow's images, byte by byte; and what is drawn.
#include "data/rand_augment.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "tests/data/golden.h"

namespace lockstep::data {
namespace {

/// make_images.py's dim().
std::vector<std::uint8_t> picture(ImageSize size) {
  std::vector<std::uint8_t> bytes;
  for (std::uint32_t y = 0; y < static_cast<std::uint32_t>(size.height); ++y)
    for (std::uint32_t x = 0; x < static_cast<std::uint32_t>(size.width); ++x)
      for (std::uint32_t c = 0; c < 3; ++c)
        bytes.push_back(static_cast<std::uint8_t>(golden::noise(x, y, c) / 2 + 20 + 10 * c));
  return bytes;
}

constexpr const char* kNames[kPixelOps] = {"Identity",  "ShearX",     "ShearY",       "TranslateX", "TranslateY",
                                           "Rotate",    "Brightness", "Color",        "Contrast",   "Sharpness",
                                           "Posterize", "Solarize",   "AutoContrast", "Equalize"};

TEST(RandAugment, OperationsAreTorchvisions) {
  PixelChanger changer;
  int cases = 0;
  for (const auto& fact : golden::facts()["augmented"]) {
    const ImageSize size = {fact["image"][0], fact["image"][1]};
    const std::string name = fact["operation"];
    const auto op = static_cast<PixelOp>(std::ranges::find(kNames, name) - kNames);
    const auto magnitudes = fact["magnitudes"].get<std::vector<double>>();
    ASSERT_EQ(has_sign(op), magnitudes.size() == 2 * kMagnitudes) << name;
    for (std::size_t i = 0; i < magnitudes.size(); ++i) {
      SCOPED_TRACE(fact["image"].dump() + " " + name + " by " + std::to_string(magnitudes[i]));
      const double own = magnitude_of(op, static_cast<int>(i) % kMagnitudes, size);
      // torch.linspace() differs in the last place from machine to machine.
      ASSERT_NEAR(own, std::abs(magnitudes[i]), 1.2e-7 * std::abs(own));
      ASSERT_EQ(std::trunc(own), std::trunc(std::abs(magnitudes[i])));
      std::vector<std::uint8_t> image = picture(size);
      changer.apply(op, magnitudes[i], image, size);
      ASSERT_EQ(crc32(0, image.data(), static_cast<uInt>(image.size())), fact["sums"][i].get<std::uint32_t>());
      ++cases;
    }
  }
  EXPECT_EQ(cases, 6 * (9 * 62 + 2 * 31 + 3));
}

// Where a channel has one value, and where the image is all of one.
TEST(RandAugment, EvenImages) {
  PixelChanger changer;
  for (const std::uint8_t value : {0, 77, 255})
    for (int op = 0; op < kPixelOps; ++op) {
      std::vector<std::uint8_t> image(3 * 9 * 4, value);
      changer.apply(static_cast<PixelOp>(op), 0, image, {9, 4});
      // Of no bits nothing stays; above 0 all is inverted.
      const auto wanted = op == static_cast<int>(PixelOp::kPosterize)  ? 0
                          : op == static_cast<int>(PixelOp::kSolarize) ? 255 - value
                                                                       : value;
      EXPECT_EQ(image, std::vector<std::uint8_t>(image.size(), static_cast<std::uint8_t>(wanted))) << kNames[op];
    }
}

TEST(RandAugment, IsAFunctionOfTheDrawThatTakesAllOperations) {
  PixelChanger changer;
  const ImageSize size = {33, 17};
  const auto made = [&](RandAugment what, std::uint64_t draw) {
    auto image = picture(size);
    changer.apply(what, draw, image, size);
    return image;
  };
  EXPECT_EQ(made({.count = 0, .bin = 15}, 1), picture(size));
  std::set<std::vector<std::uint8_t>> one;
  for (std::uint64_t draw = 0; draw < 400; ++draw) {
    const auto image = made({.count = 1, .bin = 15}, draw);
    EXPECT_EQ(made({.count = 1, .bin = 15}, draw), image);
    one.insert(image);
  }
  // Of nine operations both signs, and of five one.
  EXPECT_EQ(one.size(), 2u * 9 + 5);
  std::set<std::vector<std::uint8_t>> two;
  for (std::uint64_t draw = 0; draw < 400; ++draw) two.insert(made({.count = 2, .bin = 15}, draw));
  EXPECT_GT(two.size(), 150u);
}

}  // namespace
}  // namespace lockstep::data
