// Errors and the area under the ROC curve, beside their definitions.
#include "trainer/scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "base/splitmix.h"
#include "data/table_schema.h"
#include "lockstep/comm/make_group.h"

namespace lockstep::trainer {
namespace {

class OneNumber final : public data::Dataset {
 public:
  explicit OneNumber(std::shared_ptr<const data::TableSchema> table = nullptr)
      : Dataset({.name = "numbers",
                 .size = 1,
                 .dims = {1},
                 .target_dims = {1},
                 .numeric_targets = true,
                 .table = std::move(table)}) {}
};

TEST(Scores, ErrorsAreTheirDefinitions) {
  const std::vector<float> targets = {1, 2, 4, 9}, outputs = {1.5f, 2, 3, 10};
  const ErrorReport report = errors_of(error_sums(outputs, targets), 4, OneNumber());
  EXPECT_DOUBLE_EQ(report.mae, (0.5 + 0 + 1 + 1) / 4);
  EXPECT_DOUBLE_EQ(report.rmse, std::sqrt((0.25 + 0 + 1 + 1) / 4));
  EXPECT_DOUBLE_EQ(report.r2.value(), 1 - 2.25 / (9 + 4 + 0 + 25));  // around the mean, 4
}

TEST(Scores, AreInTheUnitsOfATablesTarget) {
  const auto schema = std::make_shared<const data::TableSchema>(
      data::TableSchema{.columns = {}, .target = {.name = "y", .mean = 100, .deviation = 20}});
  const std::vector<float> targets = {-1, 1}, outputs = {0, 1};
  const ErrorReport report = errors_of(error_sums(outputs, targets), 2, OneNumber(schema));
  EXPECT_DOUBLE_EQ(report.mae, 10);
  EXPECT_DOUBLE_EQ(report.rmse, 20 * std::sqrt(0.5));
  EXPECT_DOUBLE_EQ(report.r2.value(), 0.5);
}

TEST(Scores, TargetsThatAreOneNumberHaveNoVarianceToExplain) {
  EXPECT_FALSE(
      errors_of(error_sums(std::vector<float>{1, 3}, std::vector<float>{2, 2}), 2, OneNumber()).r2.has_value());
}

TEST(Scores, QuantilesAreOfTheSizesOfErrors) {
  SampleOutputs samples;
  for (int i = 1; i <= 100; ++i) {
    samples.targets.push_back(5);
    samples.outputs.push_back(5 + static_cast<float>(i % 2 ? i : -i));
  }
  const ErrorQuantiles errors(samples, OneNumber());
  EXPECT_DOUBLE_EQ(errors.at(0.5), 50);
  EXPECT_DOUBLE_EQ(errors.at(0.99), 99);
  EXPECT_DOUBLE_EQ(errors.at(1), 100);
  EXPECT_DOUBLE_EQ(errors.at(0.001), 1);
  EXPECT_NEAR(errors.mean(), -0.5, 1e-12);
}

double auc_of(const std::vector<float>& scores, const std::vector<std::int32_t>& labels) {
  const auto group = std::make_unique<comm::SelfGroup>(std::chrono::seconds(1));
  std::vector<float> logits;
  for (const float score : scores) logits.insert(logits.end(), {1, 1 + score});
  RankedSamples ranked;
  ranked.add(logits, labels);
  return ranked.auc(*group);
}

TEST(Scores, TheAreaCountsPairsInTheRightOrder) {
  SplitMix64 random(5);
  std::vector<float> scores;
  std::vector<std::int32_t> labels;
  for (int i = 0; i < 200; ++i) {
    labels.push_back(static_cast<std::int32_t>(random.below(3) == 0));
    scores.push_back(static_cast<float>(random.below(20)) + static_cast<float>(labels.back()) * 4);  // with ties
  }
  double right = 0, pairs = 0;
  for (std::size_t i = 0; i < scores.size(); ++i)
    for (std::size_t j = 0; j < scores.size(); ++j) {
      if (labels[i] != 1 || labels[j] != 0) continue;
      ++pairs;
      right += scores[i] > scores[j] ? 1 : scores[i] == scores[j] ? 0.5 : 0;
    }
  EXPECT_DOUBLE_EQ(auc_of(scores, labels), right / pairs);
  EXPECT_DOUBLE_EQ(auc_of({1, 2, 3}, {0, 0, 1}), 1);
  EXPECT_DOUBLE_EQ(auc_of({3, 2, 1}, {0, 0, 1}), 0);
  EXPECT_TRUE(std::isnan(auc_of({1, 2}, {1, 1})));
  EXPECT_TRUE(std::isnan(auc_of({}, {})));
}

}  // namespace
}  // namespace lockstep::trainer
