// Mixed training samples: what is drawn, what becomes of numbers and targets, and that neither ranks nor workers
// matter.
#include "data/mixing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

using ::testing::HasSubstr;

// Mean, variance, and the share of values below 0.1, which for alpha = 1 and 2 is 0.1 and 3·0.1² − 2·0.1³.
TEST(Mixing, SharesAreOfTheBetaDistribution) {
  constexpr int kDraws = 40000;
  for (const double alpha : {0.2, 0.5, 1.0, 2.0, 8.0, 1000.0}) {
    SplitMix64 random(7);
    double sum = 0, squares = 0;
    int low = 0;
    for (int i = 0; i < kDraws; ++i) {
      const double share = draw_share(random, alpha);
      ASSERT_TRUE(share >= 0 && share <= 1);
      sum += share;
      squares += (share - 0.5) * (share - 0.5);
      low += share < 0.1 ? 1 : 0;
    }
    const double variance = 1 / (4 * (2 * alpha + 1));
    EXPECT_NEAR(sum / kDraws, 0.5, 4 * std::sqrt(variance / kDraws)) << alpha;
    EXPECT_NEAR(squares / kDraws, variance, 0.03 * variance) << alpha;
    const std::map<double, double> below = {
        {1.0, 0.1}, {2.0, 0.028}, {0.5, 2 / std::acos(-1.0) * std::asin(std::sqrt(0.1))}};
    if (const auto known = below.find(alpha); known != below.end()) {
      EXPECT_NEAR(low / double{kDraws}, known->second, 0.008) << alpha;
    }
  }
  SplitMix64 random(7);
  for (int i = 0; i < 1000; ++i) {
    const double share = draw_share(random, 1e-300);
    ASSERT_TRUE(share < 1e-6 || share > 1 - 1e-6);
  }
}

TEST(Mixing, PartnersAndKindsAreEquallyLikely) {
  constexpr int kDraws = 20000, kSamples = 5;
  int pasted = 0;
  std::map<std::uint64_t, int> partners;
  for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
    const Mix mix = draw_mix({.mixup = 0.4, .cutmix = 1}, draw, kSamples, {8, 8});
    ++partners[mix.partner];
    pasted += mix.pasted ? 1 : 0;
    EXPECT_FALSE(draw_mix({.mixup = 0.4}, draw, kSamples, {8, 8}).pasted);
    EXPECT_TRUE(draw_mix({.cutmix = 0.4}, draw, kSamples, {8, 8}).pasted);
  }
  EXPECT_NEAR(pasted, kDraws / 2.0, 4 * std::sqrt(kDraws / 4.0));
  ASSERT_EQ(partners.size(), std::size_t{kSamples});
  for (const auto& [partner, times] : partners)
    EXPECT_NEAR(times, kDraws / double{kSamples}, 4 * std::sqrt(0.16 * kDraws));
  EXPECT_EQ(draw_mix({.mixup = 1}, 3, 1, {8, 8}).partner, 0u);
  EXPECT_GT(draw_mix({.mixup = 1}, 3, ~std::uint64_t{0}, {8, 8}).partner, std::uint64_t{1} << 40);
}

TEST(Mixing, RectanglesHaveTheShareThatIsPasted) {
  for (const ImageSize size : {ImageSize{1, 1}, ImageSize{1, 7}, ImageSize{32, 32}, ImageSize{33, 17}}) {
    const double all = double(size.width) * size.height;
    double area = 0;
    constexpr int kDraws = 4000;
    for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
      const Mix mix = draw_mix({.cutmix = 1}, draw, 10, size);
      ASSERT_TRUE(mix.left >= 0 && mix.width >= 0 && mix.left + mix.width <= size.width);
      ASSERT_TRUE(mix.top >= 0 && mix.height >= 0 && mix.top + mix.height <= size.height);
      ASSERT_EQ(mix.share, 1 - mix.width * mix.height / all);
      // An even side, of which a part may lie outside.
      ASSERT_LE(mix.width, 2 * (size.width / 2));
      area += mix.width * mix.height / all;
    }
    // A rectangle of sides √u has on average (1 − √u/4)² of itself inside; u is uniform. Sides are rounded down.
    if (size == ImageSize{32, 32}) {
      EXPECT_NEAR(area / kDraws, 0.5 - 0.2 + 1.0 / 48, 0.04);
    }
  }
}

TEST(Mixing, NumbersAreMeansOrThePartners) {
  const ImageSize size = {5, 3};
  const std::size_t count = 5 * 3 * 2;
  std::vector<float> own(count), other(count);
  for (std::size_t i = 0; i < count; ++i) own[i] = static_cast<float>(i), other[i] = -3 * static_cast<float>(i) - 1;
  auto x = own;
  mix_into(x, other, {.partner = 1, .share = 0.3}, size);
  for (std::size_t i = 0; i < count; ++i) EXPECT_NEAR(x[i], 0.3f * own[i] + 0.7f * other[i], 1e-5);
  x = own;
  mix_into(x, other, {.partner = 1, .share = 0.6, .pasted = true, .left = 2, .top = 1, .width = 3, .height = 2}, size);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t row = i / 10, column = i / 2 % 5;
    EXPECT_EQ(x[i], row >= 1 && column >= 2 ? other[i] : own[i]) << i;
  }
}

/// What a training of two epochs reads, by epoch and sample.
struct Read {
  std::vector<float> x, targets;
  bool operator==(const Read&) const = default;
};
std::map<std::pair<std::uint64_t, std::uint64_t>, Read> read_all(const std::shared_ptr<const Dataset>& dataset,
                                                                 int ranks, int workers,
                                                                 sampler::SamplerState from = {}) {
  std::map<std::pair<std::uint64_t, std::uint64_t>, Read> all;
  for (int rank = 0; rank < ranks; ++rank) {
    sampler::DistributedSampler sampler({.length = dataset->size(), .seed = 9, .global_batch = 100}, rank, ranks);
    sampler.restore(from);
    Loader loader(dataset, sampler, {.workers = workers});
    for (std::uint64_t epoch = from.epoch; epoch < 2;) {
      const Batch& batch = loader.next();
      EXPECT_TRUE(batch.labels.empty());
      std::vector<std::uint64_t> indices(batch.count);
      sampler.indices(sampler.plan(), indices);
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const auto part = [&](std::span<const float> values) {
          const std::size_t each = values.size() / batch.count;
          return std::vector<float>(values.begin() + static_cast<std::ptrdiff_t>(i * each),
                                    values.begin() + static_cast<std::ptrdiff_t>((i + 1) * each));
        };
        all[{batch.plan.epoch, indices[i]}] = {part(batch.x), part(batch.targets)};
      }
      sampler.advance();
      epoch = batch.state_after.epoch;
    }
  }
  return all;
}

TEST(Mixing, SamplesAreTheSameOnAnyRanksAndWorkersAndOnwards) {
  const auto dataset = open_data("digits", {.settings = {{"mixup", 0.8}, {"cutmix", 1.0}}}).train;
  const auto one = read_all(dataset, 1, 0);
  ASSERT_EQ(one.size(), 2 * dataset->size());
  EXPECT_EQ(read_all(dataset, 1, 3), one);
  EXPECT_EQ(read_all(dataset, 3, 1), one);
  for (const auto& [place, read] : read_all(dataset, 2, 1, {.epoch = 1, .cursor = 300})) EXPECT_EQ(read, one.at(place));
  // Two epochs have their own.
  int other = 0;
  for (std::uint64_t i = 0; i < dataset->size(); ++i) other += one.at({0, i}) != one.at({1, i}) ? 1 : 0;
  EXPECT_GT(other, 1400);
}

TEST(Mixing, TargetsAreTheSharesOfTheTwoLabels) {
  const auto plain = open_data("digits").train;
  for (const bool pastes : {false, true}) {
    const auto dataset = open_data("digits", {.classes = 12, .settings = {{pastes ? "cutmix" : "mixup", 1.0}}}).train;
    int mixed = 0;
    for (const auto& [place, read] : read_all(dataset, 1, 0)) {
      ASSERT_EQ(read.targets.size(), 12u);
      double sum = 0;
      for (const float p : read.targets) sum += double{p};
      ASSERT_NEAR(sum, 1, 1e-6);
      std::vector<float> own(64);
      std::int32_t label = -1;
      plain->read(place.second, own, label);
      const float share = read.targets[static_cast<std::size_t>(label)];
      if (share == 1) continue;
      ++mixed;
      const auto second = std::ranges::find_if(
          read.targets, [&](const float& p) { return p > 0 && &p - read.targets.data() != label; });
      ASSERT_NE(second, read.targets.end());
      ASSERT_NEAR(*second, 1 - share, 1e-6);
      // Some sample of that class explains the numbers.
      if (place.first == 1 || place.second % 37 != 0) continue;
      bool found = false;
      std::vector<float> partner(64);
      std::int32_t of_partner = -1;
      for (std::uint64_t i = 0; i < plain->size() && !found; ++i) {
        plain->read(i, partner, of_partner);
        if (of_partner != second - read.targets.begin()) continue;
        found = true;
        for (std::size_t k = 0; k < 64 && found; ++k)
          found = pastes ? read.x[k] == own[k] || read.x[k] == partner[k]
                         : std::abs(read.x[k] - (share * own[k] + (1 - share) * partner[k])) < 1e-5f;
      }
      EXPECT_TRUE(found) << place.second;
    }
    EXPECT_GT(mixed, 2000);
  }
}

TEST(Mixing, EvaluationsReadSamplesAsTheyAre) {
  const auto dataset = open_data("digits", {.settings = {{"mixup", 1.0}}}).train;
  Loader loader(dataset, {0, dataset->size()}, 100, {});
  const Batch& batch = loader.next();
  EXPECT_EQ(batch.labels.size(), 100u);
  EXPECT_TRUE(batch.targets.empty());
}

class OfVectors final : public Dataset {
 public:
  explicit OfVectors(std::vector<std::int64_t> dims, int label = 0)
      : Dataset({.name = "own", .size = 4, .dims = std::move(dims), .classes = 2, .mixing = {.mixup = 1}}),
        label_(label) {}
  void read(std::uint64_t, std::span<float> x, std::int32_t& label) const override {
    std::ranges::fill(x, 1.0f);
    label = label_;
  }

 private:
  std::int32_t label_;
};

TEST(Mixing, OtherSamplesAreRefused) {
  const auto read = [](std::shared_ptr<const Dataset> dataset) {
    Loader loader(std::move(dataset), sampler::DistributedSampler({.length = 4, .global_batch = 4}, 0, 1),
                  {.workers = 0});
    loader.next();
  };
  EXPECT_THAT(testing::refusal_of<UsageError>([&] { read(std::make_shared<OfVectors>(std::vector<std::int64_t>{4})); }),
              HasSubstr("are not images with one label each"));
  const std::vector<std::int64_t> image = {2, 2, 1};
  for (const int label : {-1, 2})
    EXPECT_THAT(testing::refusal_of<UsageError>([&] { read(std::make_shared<OfVectors>(image, label)); }),
                HasSubstr("of own, which has 2 classes"));
  read(std::make_shared<OfVectors>(image));
  EXPECT_THROW(open_data("random:4,10", {.settings = {{"mixup", 0.2}}}), UsageError);
}

}  // namespace
}  // namespace lockstep::data
