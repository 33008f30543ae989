// Statistics of measurements that are repeated round by round: how sure a figure is, and whether two differ.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/statistics.h"

namespace lockstep::bench {

double mean(std::span<const double> values);
/// Of the values themselves, not an estimate of what they were drawn from: numpy.std(), which Horovod's synthetic
/// benchmark prints 1.96 times. 0 for one value.
double standard_deviation(std::span<const double> values);

/// The value that Student's t with `degrees` > 0 degrees of freedom is below with `probability` in (0, 1).
double student_t_quantile(double probability, double degrees);

struct Interval {
  double middle = 0, low = 0, high = 0;
};

inline constexpr double kConfidence = 0.95;

/// Of positive ratios: their geometric mean, with Student's confidence interval on their logarithms. (A ratio and its
/// inverse get the same statement so.) Fewer than two have no interval: low and high are the middle.
/// Source: Student, "The probable error of a mean", Biometrika 6 (1908).
Interval ratio_interval(std::span<const double> ratios);

/// The probability that two samples of one distribution differ in rank as much as these do, either way. Exact, by
/// counting all ways to divide the ranks (equal values share their mean rank), for up to kMostExact values together;
/// else by the normal approximation with corrections for ties and continuity. NaN if one of them is empty.
/// Source: Mann and Whitney, "On a test of whether one of two random variables is stochastically larger than the
/// other", Annals of Mathematical Statistics 18 (1947); ties: Lehmann, "Nonparametrics" (1975), 1.4.
double mann_whitney_p(std::span<const double> a, std::span<const double> b);
inline constexpr std::size_t kMostExact = 60;

/// The least that mann_whitney_p() of so many values can be.
double least_mann_whitney_p(std::size_t a, std::size_t b);

}  // namespace lockstep::bench
