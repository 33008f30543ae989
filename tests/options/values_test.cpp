#include "options/values.h"

#include <gmock/gmock.h>

#include "tests/options/example_table.h"

namespace lockstep::options {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Integer, TakesItsRangeAndNothingElse) {
  int value = 7;
  const Setter set = integer(value, 1, 10).set;
  for (const char* bad : {"", "0", "11", "-1", "1.0", "1e1", " 1", "1 ", "0x1", "99999999999999999999", "ten"}) {
    const auto complaint = set(bad);
    ASSERT_TRUE(complaint) << bad;
    EXPECT_THAT(complaint->remedy, HasSubstr("from 1 to 10")) << bad;
    EXPECT_EQ(value, 7) << bad;
  }
  EXPECT_FALSE(set("1"));
  EXPECT_EQ(value, 1);
  EXPECT_FALSE(set("10"));
  EXPECT_EQ(value, 10);
}

TEST(Integer, FillsAnOptional) {
  std::optional<std::int64_t> value;
  EXPECT_TRUE(integer(value, 0, 5).set("6"));
  EXPECT_FALSE(value);
  EXPECT_FALSE(integer(value, 0, 5).set("0"));
  EXPECT_EQ(value, 0);
}

TEST(Number, IsFiniteAndInRange) {
  double value = 7;
  const Setter set = number(value, {.low = 0, .high = 1, .open_low = true}).set;
  for (const char* bad : {"", "nan", "inf", "-inf", "1e999", "0", "-0.5", "1.5", "0,5", "0.5x"}) {
    EXPECT_TRUE(set(bad)) << bad;
    EXPECT_EQ(value, 7) << bad;
  }
  EXPECT_FALSE(set("1e-3"));
  EXPECT_EQ(value, 1e-3);
  EXPECT_FALSE(set("1"));
  EXPECT_EQ(value, 1);
}

TEST(Number, ClosedRangeTakesItsEnds) {
  double value = 7;
  EXPECT_FALSE(number(value, {}).set("0"));
  EXPECT_EQ(value, 0);
  EXPECT_TRUE(number(value, {}).set("-1e-9"));
}

TEST(Setting, OfTwoNumbersNeedsTwoGoodOnes) {
  Settings value = {{"betas", {1.0, 2.0}}};
  const Setter set = setting(value, pair_of_numbers()).set;
  for (const char* bad : {"", "0.9", "0.9,", ",0.9", "0.9,0.9,0.9", "0.9,2", "a,b"}) {
    EXPECT_TRUE(set(bad)) << bad;
    EXPECT_THAT(value.numbers("betas"), ElementsAre(1, 2)) << bad;
  }
  EXPECT_FALSE(set("0.9, 0.95"));
  EXPECT_THAT(value.numbers("betas"), ElementsAre(0.9, 0.95));
}

TEST(Setting, OfWholeNumbersChecksAll) {
  Settings value = {{"hidden", {3}}};
  const Setter set = setting(value, whole_numbers(1, 100)).set;
  for (const char* bad : {"", "5,", "5,,6", "5,101", "5 6"}) {
    EXPECT_TRUE(set(bad)) << bad;
    EXPECT_THAT(value.integers("hidden"), ElementsAre(3)) << bad;
  }
  EXPECT_FALSE(set("5,6"));
  EXPECT_THAT(value.integers("hidden"), ElementsAre(5, 6));
}

TEST(Setting, NamesItsRange) {
  Settings value;
  const SettingSpec size = {.name = "layers", .fallback = 4, .help = "", .low = 1, .high = 100};
  for (const char* bad : {"", "x", "0", "101", "1.5"})
    EXPECT_EQ(setting(value, size).set(bad)->remedy, "give an integer from 1 to 100") << bad;
  const SettingSpec share = {.name = "dropout", .fallback = 0.0, .help = "", .high = 1, .open_high = true};
  for (const char* bad : {"1", "1.5", "-0.1", "nan", "x"}) EXPECT_TRUE(setting(value, share).set(bad)) << bad;
  EXPECT_TRUE(value.empty());
  EXPECT_FALSE(setting(value, size).set("7"));
  EXPECT_EQ(value.integer("layers"), 7);
  EXPECT_FALSE(setting(value, size).check());
  value.set("layers", 0);
  EXPECT_TRUE(setting(value, size).check());
}

TEST(Choice, SuggestsTheNearest) {
  int value = 0;
  const Setter set = choice(value, {{"constant", 1}, {"cosine", 2}, {"step", 3}}).set;
  EXPECT_FALSE(set("cosine"));
  EXPECT_EQ(value, 2);
  const auto close = set("cosin");
  ASSERT_TRUE(close);
  EXPECT_THAT(close->remedy, HasSubstr("did you mean cosine?"));
  const auto far = set("polynomial");
  ASSERT_TRUE(far);
  EXPECT_THAT(far->remedy, HasSubstr("one of constant, cosine, step"));
  EXPECT_TRUE(set("COSINE"));
  EXPECT_EQ(value, 2);
}

TEST(Boolean, KnowsFourWordsForEach) {
  bool value = false;
  for (const char* yes : {"true", "1", "yes", "on"}) {
    value = false;
    EXPECT_FALSE(boolean(value).set(yes));
    EXPECT_TRUE(value) << yes;
  }
  for (const char* no : {"false", "0", "no", "off"}) {
    value = true;
    EXPECT_FALSE(boolean(value).set(no));
    EXPECT_FALSE(value) << no;
  }
  EXPECT_TRUE(boolean(value).set("maybe"));
}

}  // namespace
}  // namespace lockstep::options
