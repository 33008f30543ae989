// Resizing against Pillow's, and views of images against torchvision's.
#include "data/resample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/splitmix.h"
#include "tests/data/golden.h"

namespace lockstep::data {
namespace {

constexpr Normalisation kBytes = {{0, 0, 0}, {1, 1, 1}};  // numbers are bytes / 255

std::vector<float> run(const golden::Picture& picture, const Resampling& what, const Normalisation& by = kBytes) {
  std::vector<float> out(static_cast<std::size_t>(what.window.width * what.window.height) * 3);
  Resampler().run(picture.view(), what, by, out);
  return out;
}

// To the bit: bytes as Pillow has them, and what torchvision's ToTensor makes of those.
void expect_equal(const std::vector<float>& out, const nlohmann::json& pixels) {
  ASSERT_EQ(out.size(), pixels.size());
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], pixels[i].get<float>() / 255.0f) << "number " << i;
}

Resampling whole_of(const nlohmann::json& fact) {
  Resampling what;
  const auto& box = fact["box"];
  what.box = {box[0], box[1], box[2], box[3]};
  what.size = what.window = {fact["size"][0], fact["size"][1]};
  return what;
}

TEST(Resampler, MatchesPillow) {
  const golden::Picture picture({37, 29});
  int cases = 0;
  for (const auto& fact : golden::facts()["resized"]) {
    const Resampling what = whole_of(fact);
    SCOPED_TRACE(fact["box"].dump() + " to " + fact["size"].dump());
    expect_equal(run(picture, what), fact["pixels"]);
    ++cases;
  }
  EXPECT_EQ(cases, 13);
}

TEST(Resampler, EvaluationMatchesTorchvision) {
  int cases = 0;
  for (const auto& fact : golden::facts()["evaluated"]) {
    const golden::Picture picture({fact["image"][0], fact["image"][1]});
    const Resampling what = evaluation_view(picture.size, fact["size"]);
    SCOPED_TRACE(fact["image"].dump() + " to " + fact["size"].dump());
    expect_equal(run(picture, what), fact["pixels"]);
    ++cases;
  }
  EXPECT_EQ(cases, 5);
}

TEST(Resampler, WeightsSumToOne) {
  // Weights sum to 1: what is even stays even, in any size.
  golden::Picture picture({23, 31});
  std::fill(picture.bytes.begin(), picture.bytes.end(), std::uint8_t{200});
  for (const int side : {1, 2, 7, 23, 24, 100}) {
    Resampling what;
    what.box = {1.25, 0.5, 20.5, 30.25};
    what.size = what.window = {side, side};
    for (const float v : run(picture, what)) ASSERT_NEAR(v, 200.0f / 255, 1e-6f) << side;
  }
}

TEST(Resampler, WindowsMirrorsAndNormalises) {
  const golden::Picture picture({37, 29});
  Resampling what;
  what.box = {2, 3, 31, 25};
  what.size = what.window = {16, 12};
  const auto whole = run(picture, what);
  Resampling part = what;
  part.left = 5;
  part.top = 4;
  part.window = {7, 3};
  part.mirrored = true;
  const auto out = run(picture, part, kImageNet);
  for (std::size_t y = 0; y < 3; ++y)
    for (std::size_t x = 0; x < 7; ++x)
      for (std::size_t c = 0; c < 3; ++c) {
        const float plain = whole[((y + 4) * 16 + 5 + (6 - x)) * 3 + c];
        ASSERT_NEAR(out[(y * 7 + x) * 3 + c], (plain - kImageNet.mean[c]) / kImageNet.std[c], 1e-5f);
      }
}

TEST(Views, EvaluationTakesTheMiddle) {
  const Resampling what = evaluation_view({500, 375}, 224);
  EXPECT_EQ(what.size, (ImageSize{341, 256}));
  EXPECT_EQ(what.left, 58);  // 58.5, to even
  EXPECT_EQ(what.top, 16);
  EXPECT_EQ(evaluation_view({1, 1}, 1).size, (ImageSize{1, 1}));
  const Resampling thin = evaluation_view({1, static_cast<int>(kMostImageSide)}, kMostImageSize);
  EXPECT_EQ(thin.size.width, 4681);
  EXPECT_GT(thin.size.height, 1'000'000'000);
}

TEST(Views, TrainingStaysWithinTheImageAndItsLimits) {
  int mirrored = 0, squares = 0;
  std::set<double> lefts;
  const int tries = 4000;
  double area = 0;
  for (int i = 0; i < tries; ++i) {
    const Resampling what = training_view({500, 375}, 224, mix64(7, static_cast<std::uint64_t>(i)));
    ASSERT_GE(what.box.left, 0);
    ASSERT_GE(what.box.top, 0);
    ASSERT_LE(what.box.left + what.box.width, 500);
    ASSERT_LE(what.box.top + what.box.height, 375);
    const double part = what.box.width * what.box.height / (500.0 * 375), ratio = what.box.width / what.box.height;
    ASSERT_GT(part, 0.078);
    ASSERT_GT(ratio, 0.74);
    ASSERT_LT(ratio, 1.35);
    area += part;
    mirrored += what.mirrored;
    squares += std::abs(ratio - 1) < 0.1;
    lefts.insert(what.box.left);
  }
  EXPECT_NEAR(mirrored, tries / 2.0, 200);
  // Areas are uniform in 8 % to 100 % and the ratio's logarithm is uniform, less what does not fit. These are the means
  // of 20,000 windows of torchvision 0.30's RandomResizedCrop, and six standard deviations of 4000.
  EXPECT_NEAR(area / tries, 0.435, 0.024);
  EXPECT_NEAR(static_cast<double>(squares) / tries, 0.341, 0.045);
  EXPECT_GT(lefts.size(), 200u);
}

TEST(Views, TrainingTakesTheMiddleWhereNothingFits) {
  const Resampling what = training_view({1000, 10}, 224, 3);
  EXPECT_EQ(what.box.height, 10);
  EXPECT_EQ(what.box.width, 13);
  EXPECT_EQ(what.box.left, 493);
  EXPECT_EQ(training_view({1, 1}, 224, 3).box.width, 1);
}

TEST(Views, ErasedRectanglesStayWithinTheirLimits) {
  constexpr int kSide = 40;
  constexpr int kDraws = 4000;
  int erased = 0;
  double area = 0;
  for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
    std::vector<float> image(3 * kSide * kSide, 1.0f);
    erase_some(image, {kSide, kSide}, 0.25, draw);
    int top = kSide, bottom = 0, left = kSide, right = 0, zeros = 0;
    for (int y = 0; y < kSide; ++y)
      for (int x = 0; x < kSide; ++x) {
        const float* pixel = image.data() + 3 * (y * kSide + x);
        ASSERT_TRUE(pixel[0] == pixel[1] && pixel[1] == pixel[2]);
        if (pixel[0] != 0) continue;
        ++zeros;
        top = std::min(top, y), bottom = std::max(bottom, y + 1), left = std::min(left, x),
        right = std::max(right, x + 1);
      }
    if (zeros == 0) continue;
    ++erased;
    const int height = bottom - top, width = right - left;
    ASSERT_EQ(zeros, height * width);
    area += zeros;
    // Sides are rounded.
    EXPECT_GE((height + 0.5) * (width + 0.5), 0.02 * kSide * kSide);
    EXPECT_LE((height - 0.5) * (width - 0.5), 0.33 * kSide * kSide);
    EXPECT_LE((height - 0.5) / (width + 0.5), 3.3);
    EXPECT_GE((height + 0.5) / (width - 0.5), 0.3);
    std::vector<float> again(image.size(), 1.0f);
    erase_some(again, {kSide, kSide}, 0.25, draw);
    ASSERT_EQ(again, image);
  }
  // Four standard deviations of 4,000 draws.
  EXPECT_NEAR(erased, 0.25 * kDraws, 4 * std::sqrt(0.25 * 0.75 * kDraws));
  // The mean of the uniform distribution; where a side does not fit, another is drawn.
  EXPECT_NEAR(area / erased / (kSide * kSide), 0.17, 0.02);
}

TEST(Views, JpegsAreDecodedNoSmallerThanNeeded) {
  Resampling what;
  what.size = what.window = {224, 224};
  what.box = {0, 0, 447, 2000};
  EXPECT_EQ(eighths_for(what), 8);
  what.box.width = 448;
  EXPECT_EQ(eighths_for(what), 4);
  what.box.width = 1800;
  EXPECT_EQ(eighths_for(what), 1);
  const Resampling small = for_decoded(what, {2000, 2000}, {250, 250});
  EXPECT_EQ(small.box.width, 225);
  EXPECT_EQ(small.box.height, 250);
}

}  // namespace
}  // namespace lockstep::data
