#include "data/built_in.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "lockstep/data/open.h"

namespace lockstep::data {
namespace {

using Histogram = std::array<int, kDigitsClasses>;

Histogram histogram_of(const Dataset& dataset) {
  Histogram counts{};
  std::vector<float> x(dataset.sample_elements());
  for (std::uint64_t i = 0; i < dataset.size(); ++i) {
    std::int32_t label = -1;
    dataset.read(i, x, label);
    EXPECT_TRUE(label >= 0 && label < kDigitsClasses);
    ++counts[static_cast<std::size_t>(label)];
  }
  return counts;
}

TEST(Digits, FileIsTheOneThatTheReadmeDescribes) {
  const auto file = digits_file();
  EXPECT_EQ(file.size(), 1797u * 65);
  Sha256 sha;
  sha.update(std::as_bytes(file));
  EXPECT_EQ(sha.finish(), "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2");
}

TEST(Digits, SplitsByEveryFifth) {
  const DataSplits digits = open_data("digits");
  EXPECT_EQ(digits.train->size(), 1437u);
  EXPECT_EQ(digits.validation->size(), 360u);
  for (const auto& part : {digits.train, digits.validation}) {
    EXPECT_EQ(part->sample_dims(), (std::vector<std::int64_t>{8, 8, 1}));
    EXPECT_EQ(part->sample_elements(), 64u);
    EXPECT_EQ(part->classes(), 10);
  }
  std::uint64_t train = 0, test = 0;
  for (std::uint64_t i = 0; i < 1797; ++i) {
    const auto record = digits_file().subspan(i * 65, 65);
    const Dataset& part = i % 5 == 0 ? *digits.validation : *digits.train;
    std::array<float, 64> x{};
    std::int32_t label = -1;
    part.read(i % 5 == 0 ? test++ : train++, x, label);
    ASSERT_EQ(label, record[64]);
    for (std::size_t p = 0; p < 64; ++p) ASSERT_EQ(x[p] * 16, static_cast<float>(record[p]));
  }
  EXPECT_EQ(train, digits.train->size());
  EXPECT_EQ(test, digits.validation->size());
}

TEST(Digits, ClassesAreThoseThatScikitLearnCounts) {
  const DataSplits digits = open_digits(kDigitsClasses);
  Histogram all = histogram_of(*digits.train);
  const Histogram test = histogram_of(*digits.validation);
  std::transform(all.begin(), all.end(), test.begin(), all.begin(), std::plus<>());
  EXPECT_EQ(all, (Histogram{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}));
}

TEST(Digits, FirstImageIsTheZeroOfTheDocumentation) {
  std::array<float, 64> x{};
  std::int32_t label = -1;
  open_digits(kDigitsClasses).validation->read(0, x, label);
  EXPECT_EQ(label, 0);
  const std::array<float, 8> first_row = {0, 0, 5, 13, 9, 1, 0, 0};
  for (std::size_t p = 0; p < 8; ++p) EXPECT_EQ(x[p] * 16, first_row[p]);
}

TEST(Digits, NumberOfClasses) {
  EXPECT_EQ(open_data("digits", {.classes = 12}).train->classes(), 12);
  EXPECT_THROW(open_data("digits", {.classes = 9}), UsageError);
}

TEST(Digits, IndexOutsideIsABug) {
  std::array<float, 64> x{};
  std::int32_t label = -1;
  EXPECT_THROW(open_digits(10).train->read(1437, x, label), InternalError);
  EXPECT_THROW(open_digits(10).validation->read(0, std::span<float>(x).first(63), label), InternalError);
}

}  // namespace
}  // namespace lockstep::data
