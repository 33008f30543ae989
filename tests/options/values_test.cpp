#include "options/values.h"

#include <gmock/gmock.h>

namespace lockstep::options {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

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

TEST(NumberPair, NeedsTwoGoodNumbers) {
  std::pair<double, double> value = {1, 2};
  const Setter set = number_pair(value, {.low = 0, .high = 1}).set;
  for (const char* bad : {"", "0.9", "0.9,", ",0.9", "0.9,0.9,0.9", "0.9,2", "a,b"}) {
    EXPECT_TRUE(set(bad)) << bad;
    EXPECT_THAT(value, Pair(1, 2)) << bad;
  }
  EXPECT_FALSE(set("0.9, 0.95"));
  EXPECT_THAT(value, Pair(0.9, 0.95));
}

TEST(Integers, AreAllChecked) {
  std::vector<int> value = {3};
  const Setter set = integers(value, 1, 100).set;
  for (const char* bad : {"", "5,", "5,,6", "5,101", "5 6"}) {
    EXPECT_TRUE(set(bad)) << bad;
    EXPECT_THAT(value, ElementsAre(3)) << bad;
  }
  EXPECT_FALSE(set("5,6"));
  EXPECT_THAT(value, ElementsAre(5, 6));
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
