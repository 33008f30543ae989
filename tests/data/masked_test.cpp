// Rows of tokens, some of which are masked.
#include "data/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"
#include "lockstep/data/open.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct MaskedSample {
  std::vector<std::int32_t> tokens, types, length, positions, labels;

  bool operator==(const MaskedSample&) const = default;
};

MaskedSample read_masked(const Dataset& dataset, std::uint64_t index, std::optional<std::uint64_t> draw = {}) {
  const auto tokens = static_cast<std::size_t>(dataset.sample_dims()[0]), targets = dataset.targets_per_sample();
  MaskedSample made{.tokens = std::vector<std::int32_t>(tokens),
                    .types = std::vector<std::int32_t>(tokens, -1),
                    .length = {-1},
                    .positions = std::vector<std::int32_t>(targets),
                    .labels = std::vector<std::int32_t>(targets)};
  const std::vector<Array> further = {{.numbers = {}, .integers = made.types},
                                      {.numbers = {}, .integers = made.length},
                                      {.numbers = {}, .integers = made.positions}};
  dataset.read_sample(
      index, {.x = {}, .tokens = made.tokens, .labels = made.labels, .targets = {}, .draw = draw, .further = further});
  return made;
}

DataSplits random_masked(std::int64_t length, int classes = 1000) {
  return open_data("random:tokens,400", {.classes = classes, .context = length, .word_pieces = WordPieceOptions{}});
}

constexpr std::int32_t kStart = 997, kSeparator = 998, kMask = 999;

TEST(Masked, FifteenPercentOfARowAreToBePredicted) {
  for (const auto& [length, positions] :
       std::map<std::int64_t, std::int64_t>{{3, 1}, {4, 1}, {12, 2}, {128, 19}, {512, 77}})
    EXPECT_EQ(masked_positions(length), positions) << length;
  const auto data = random_masked(128);
  EXPECT_THAT(data.train->sample_dims(), ElementsAre(128));
  EXPECT_THAT(data.train->target_dims(), ElementsAre(19));
  EXPECT_EQ(data.train->classes(), 1000);
  EXPECT_EQ(data.train->vocabulary(), 0);
  EXPECT_EQ(data.train->further_inputs().size(), 3u);
}

TEST(Masked, TargetsAreTheOriginalTokens) {
  // 500 samples: what is masked, what is any other token, and what stays.
  const auto data = random_masked(66);
  const auto rows = open_data("random:tokens,400", {.classes = 1000, .context = 64});
  std::map<std::string, int> kinds;
  std::vector<int> often(66);
  for (std::uint64_t i = 0; i < 400; ++i) {
    const MaskedSample made = read_masked(*data.train, i, 7 * i);
    std::vector<std::int32_t> row(64), next(64);
    rows.train->read_tokens(i, row, next);
    EXPECT_EQ(made.tokens.front(), kStart);
    EXPECT_EQ(made.tokens.back(), kSeparator);
    EXPECT_THAT(made.types, Each(0));
    EXPECT_THAT(made.length, ElementsAre(66));
    ASSERT_TRUE(std::ranges::is_sorted(made.positions));
    EXPECT_EQ(std::set(made.positions.begin(), made.positions.end()).size(), 10u);
    for (std::size_t k = 0; k < made.positions.size(); ++k) {
      const auto at = static_cast<std::size_t>(made.positions[k]);
      ASSERT_TRUE(at >= 1 && at <= 64) << at;
      ++often[at];
      EXPECT_EQ(made.labels[k], row[at - 1]);
      const std::int32_t now = made.tokens[at];
      ++kinds[now == kMask ? "mask" : now == row[at - 1] ? "same" : "other"];
      row[at - 1] = now;
    }
    EXPECT_TRUE(std::ranges::equal(std::span(made.tokens).subspan(1, 64), row))
        << "a token that is not predicted changed";
  }
  // Of 4,000: five standard deviations.
  EXPECT_NEAR(kinds["mask"], 3200, 5 * 25.3);
  EXPECT_NEAR(kinds["other"], 400, 5 * 19);
  EXPECT_NEAR(kinds["same"], 400, 5 * 19);
  for (std::size_t at = 1; at <= 64; ++at) EXPECT_NEAR(often[at], 62.5, 5 * 7.3) << at;
}

TEST(Masked, DependsOnTheDrawAndTheSampleAlone) {
  const auto one = random_masked(66), other = random_masked(66);
  EXPECT_EQ(read_masked(*one.train, 3, 12), read_masked(*other.train, 3, 12));
  EXPECT_NE(read_masked(*one.train, 3, 12).positions, read_masked(*one.train, 3, 13).positions);
  // Evaluations look at the same masks each time.
  EXPECT_EQ(read_masked(*one.validation, 3), read_masked(*other.validation, 3));
  EXPECT_NE(read_masked(*one.validation, 3).positions, read_masked(*one.validation, 4).positions);
}

TEST(Masked, TextIsReadAsWordPieces) {
  const testing::TemporaryDirectory directory;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "The cat sat on the mat. ";
  const auto path = directory.write("text.txt", text);
  const auto data =
      open_data("text:" + path, {.context = 16, .word_pieces = WordPieceOptions{.pieces = {}, .vocabulary_size = 64}});
  ASSERT_NE(data.train->word_pieces(), nullptr);
  EXPECT_EQ(data.train->classes(), data.train->word_pieces()->size());
  const MaskedSample first = read_masked(*data.train, 0);
  std::vector<std::int32_t> row(first.tokens.begin() + 1, first.tokens.end() - 1);
  for (std::size_t k = 0; k < first.positions.size(); ++k)
    row[static_cast<std::size_t>(first.positions[k] - 1)] = first.labels[k];
  EXPECT_EQ(data.train->word_pieces()->decode(row), "the cat sat on the mat . the cat sat on the mat .");
}

TEST(Masked, WhatCannotBeMaskedIsRefused) {
  EXPECT_THAT([] { random_masked(2); }, (ThrowsMessage<UsageError>(HasSubstr("two of which are [CLS] and [SEP]"))));
  EXPECT_THAT([] { random_masked(16, 3); }, (ThrowsMessage<UsageError>(HasSubstr("three of which are special"))));
  const testing::TemporaryDirectory directory;
  const auto path = directory.write("t.bin", std::string(2000, '\1'));
  EXPECT_THAT([&] { open_data("tokens:" + path, {.context = 16, .word_pieces = WordPieceOptions{}}); },
              (ThrowsMessage<UsageError>(HasSubstr("which of its tokens stands for a masked one"))));
}

}  // namespace
}  // namespace lockstep::data
