#include "trainer/confusion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/json.h"

namespace lockstep::trainer {
namespace {

/// Of three classes: two of the first, one of them taken for the second; two of the second; none of the third.
Confusion small() {
  Confusion confusion(3);
  const std::vector<float> logits = {2, 1, 0, 0, 5, 1, -1, 0, -2, 1, 1, 0};
  const std::vector<std::int32_t> labels = {0, 0, 1, 1};
  confusion.count(logits, labels);
  return confusion;
}

TEST(Confusion, CountsWhatEachIsTakenFor) {
  const Confusion confusion = small();
  EXPECT_EQ(confusion.at(0, 0), 1);
  EXPECT_EQ(confusion.at(0, 1), 1);
  EXPECT_EQ(confusion.at(1, 1), 1);
  EXPECT_EQ(confusion.at(1, 0), 1) << "of equal ones the first";
  EXPECT_EQ(confusion.at(2, 2), 0);
}

// scikit-learn's precision_recall_fscore_support of the same.
TEST(Confusion, HasScikitLearnsFigures) {
  Confusion confusion(std::vector<std::int64_t>{5, 1, 0, 2, 3, 0, 0, 1, 0});
  const auto first = confusion.figures_of(0), second = confusion.figures_of(1), third = confusion.figures_of(2);
  EXPECT_DOUBLE_EQ(first.precision, 5.0 / 7);
  EXPECT_DOUBLE_EQ(first.recall, 5.0 / 6);
  EXPECT_DOUBLE_EQ(first.f1, 10.0 / 13);
  EXPECT_EQ(first.support, 6);
  EXPECT_DOUBLE_EQ(second.precision, 0.6);
  EXPECT_DOUBLE_EQ(second.recall, 0.6);
  EXPECT_TRUE(std::isnan(third.precision)) << "nothing was taken for it";
  EXPECT_EQ(third.recall, 0);
  EXPECT_EQ(third.f1, 0);
  const auto mean = confusion.mean();
  EXPECT_DOUBLE_EQ(mean.precision, (5.0 / 7 + 0.6) / 3);
  EXPECT_DOUBLE_EQ(mean.f1, (10.0 / 13 + 0.6) / 3);
  EXPECT_EQ(mean.support, 12);
}

TEST(Confusion, IsShownWithNames) {
  const std::string table = table_of(small(), {"cat", "a long name"});
  EXPECT_THAT(table, ::testing::HasSubstr("cat             0.5000  0.5000  0.5000        2\n"));
  EXPECT_THAT(table, ::testing::HasSubstr("\n2                    –       –       –        0\n"));
  EXPECT_THAT(table, ::testing::HasSubstr("a long name       1      1      0\n"));
  const auto json = testing::json_in(json_of(small(), {"cat", "dog"}).text());
  EXPECT_EQ(json["classes"][1]["name"], "dog");
  EXPECT_EQ(json["classes"][2]["name"], "2");
  EXPECT_TRUE(json["classes"][2]["precision"].is_null());
  EXPECT_EQ(json["confusion"][0][1], 1);
  EXPECT_EQ(json["macro"]["support"], 4);
}

}  // namespace
}  // namespace lockstep::trainer
