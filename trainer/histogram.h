// How many of a tensor's values lie where.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::trainer {

/// Of the values that are finite.
struct Histogram {
  static constexpr int kBuckets = 30;

  std::int64_t count = 0;
  std::int64_t left_out = 0;  // NaN and infinite ones
  double min = 0, max = 0;
  double sum = 0, squares = 0;
  /// kBuckets of one width from `min` to `max`, of which limits[i] is the end of number i; one alone where all values
  /// are equal, none where there are none. Their counts are fractions, see histogram_of(), which add up to `count`.
  std::vector<double> limits = {}, counts = {};
};

/// Of all values, each multiplied by `factor`, which is positive. In one pass, which counts by sign, exponent and the
/// first four bits of the mantissa; what one such count spans, a sixteenth of its magnitude at most, is taken for
/// spread evenly.
Histogram histogram_of(std::span<const float> values, double factor = 1);

}  // namespace lockstep::trainer
