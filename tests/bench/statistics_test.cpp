#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep::bench {
namespace {

// Tables of Student's distribution have these.
TEST(StudentT, QuantilesAreThoseOfTables) {
  EXPECT_NEAR(student_t_quantile(0.975, 1), 12.7062, 1e-4);
  EXPECT_NEAR(student_t_quantile(0.975, 2), 4.30265, 1e-5);
  EXPECT_NEAR(student_t_quantile(0.975, 8), 2.306004, 1e-6);
  EXPECT_NEAR(student_t_quantile(0.95, 30), 1.697261, 1e-6);
  EXPECT_NEAR(student_t_quantile(0.975, 1e6), 1.959966, 1e-5) << "nearly normal";
  EXPECT_NEAR(student_t_quantile(0.01, 5), -3.364930, 1e-6);
  EXPECT_NEAR(student_t_quantile(0.5, 3), 0, 1e-6);
}

TEST(Deviation, IsNumpys) {
  EXPECT_DOUBLE_EQ(standard_deviation(std::vector{2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0}), 2);
  EXPECT_EQ(standard_deviation(std::vector{3.0}), 0);
}

// Of the logarithms 0 and log 4: mean log 2, deviation log 4 / √2, so the half width is t(0.975, 1) · log 2.
TEST(RatioInterval, IsStudentsOnLogarithms) {
  const Interval interval = ratio_interval(std::vector{1.0, 4.0});
  EXPECT_NEAR(interval.middle, 2, 1e-12);
  EXPECT_NEAR(interval.high, 2 * std::pow(2, 12.706205), 1e-2);
  EXPECT_NEAR(interval.low * interval.high, 4, 1e-9);
  const Interval same = ratio_interval(std::vector{1.5, 1.5, 1.5});
  EXPECT_NEAR(same.low, 1.5, 1e-12);
  EXPECT_NEAR(same.high, 1.5, 1e-12);
  const Interval inverse = ratio_interval(std::vector{1 / 1.9, 1 / 2.1}), ratio = ratio_interval(std::vector{1.9, 2.1});
  EXPECT_NEAR(inverse.low, 1 / ratio.high, 1e-9);
  const Interval one = ratio_interval(std::vector{1.9});
  EXPECT_EQ(one.low, one.high);
}

// scipy.stats.mannwhitneyu's example: U = 17, p = 1 / 9; and samples that do not overlap: 2 / (10 over 5).
TEST(MannWhitney, ExactProbabilitiesAreKnown) {
  EXPECT_NEAR(mann_whitney_p(std::vector{19.0, 22.0, 16.0, 29.0, 24.0}, std::vector{20.0, 11.0, 17.0, 12.0}), 1.0 / 9,
              1e-12);
  const std::vector low{1.0, 2.0, 3.0, 4.0, 5.0}, high{6.0, 7.0, 8.0, 9.0, 10.0};
  EXPECT_NEAR(mann_whitney_p(low, high), 2.0 / 252, 1e-12);
  EXPECT_NEAR(mann_whitney_p(high, low), 2.0 / 252, 1e-12);
  EXPECT_NEAR(mann_whitney_p(low, high), least_mann_whitney_p(5, 5), 1e-12);
  EXPECT_EQ(mann_whitney_p(low, low), 1);
  EXPECT_TRUE(std::isnan(mann_whitney_p(low, std::vector<double>{})));
}

// All 6 ways to choose two of 1, 2, 2, 3 (ranks 1, 2.5, 2.5, 4): sums 3.5, 3.5, 5, 5, 6.5, 6.5.
TEST(MannWhitney, TiesShareTheirRank) {
  EXPECT_NEAR(mann_whitney_p(std::vector{1.0, 2.0}, std::vector{2.0, 3.0}), 4.0 / 6, 1e-12);
  EXPECT_EQ(mann_whitney_p(std::vector{1.0, 1.0}, std::vector{1.0, 1.0}), 1);
}

// U = 748, 40 and 40 values with ties: z = 0.49795, computed by hand with the corrections.
TEST(MannWhitney, LargeSamplesAreApproximatelyNormal) {
  std::vector<double> a, b;
  for (int i = 0; i < 40; ++i) {
    a.push_back(i % 10);
    b.push_back(i % 10 + (i % 3 == 0 ? 1 : 0));
  }
  EXPECT_NEAR(mann_whitney_p(a, b), 0.61852219, 1e-8);
  EXPECT_EQ(mann_whitney_p(std::vector<double>(40, 1.0), std::vector<double>(40, 1.0)), 1);
  std::vector<double> more;
  for (int i = 0; i < 30; ++i) more.push_back(100 + i);
  // The two methods agree on both sides of the limit.
  const std::vector<double> thirty(a.begin(), a.begin() + 30), other(b.begin(), b.begin() + 30);
  const double exact = mann_whitney_p(thirty, other);
  std::vector<double> one_more = other;
  one_more.push_back(median(other));
  EXPECT_NEAR(mann_whitney_p(thirty, one_more), exact, 0.03);
  EXPECT_LT(mann_whitney_p(thirty, more), 1e-10);
}

}  // namespace
}  // namespace lockstep::bench
