#include "trainer/histogram.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

namespace lockstep::trainer {
namespace {

constexpr int kBitsBelow = 19;                                                // of the mantissa's 23
constexpr std::uint32_t kMagnitudes = std::uint32_t{1} << (31 - kBitsBelow);  // cells of one sign
constexpr std::uint32_t kExponent = 0x7f800000;                               // all ones: NaN or infinite

/// The least magnitude of a cell.
double magnitude_of(std::uint32_t cell) { return static_cast<double>(std::bit_cast<float>(cell << kBitsBelow)); }

/// Adds `count` values between `from` and `to` to the buckets that these reach over.
void spread(Histogram& histogram, double width, double count, double from, double to) {
  const auto bucket_of = [&](double value) {
    return std::clamp(static_cast<int>((value - histogram.min) / width), 0, Histogram::kBuckets - 1);
  };
  const int first = bucket_of(from), last = bucket_of(to);
  double left = count;
  for (int i = first; i < last; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double begin = std::max(from, histogram.min + width * i);
    const double share = std::min(left, count * std::max(0.0, histogram.limits[at] - begin) / (to - from));
    histogram.counts[at] += share;
    left -= share;
  }
  histogram.counts[static_cast<std::size_t>(last)] += left;
}

}  // namespace

Histogram histogram_of(std::span<const float> values, double factor) {
  std::array<std::int64_t, std::size_t{2} * kMagnitudes> cells{};
  Histogram made;
  float min = 0, max = 0;
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & kExponent) == kExponent) continue;
    if (made.count++ == 0) min = max = value;
    ++cells[bits >> kBitsBelow];
    min = std::min(min, value);
    max = std::max(max, value);
    const auto wide = static_cast<double>(value);
    made.sum += wide;
    made.squares += wide * wide;
  }
  made.left_out = static_cast<std::int64_t>(values.size()) - made.count;
  if (made.count == 0) return made;
  made.min = static_cast<double>(min), made.max = static_cast<double>(max);
  if (min < max) {
    const double width = (made.max - made.min) / Histogram::kBuckets;
    for (int i = 1; i < Histogram::kBuckets; ++i) made.limits.push_back(made.min + width * i);
    made.limits.push_back(made.max);
    made.counts.resize(Histogram::kBuckets);
    for (std::uint32_t cell = 0; cell < cells.size(); ++cell) {
      if (cells[cell] == 0) continue;
      const bool negative = cell >= kMagnitudes;
      const std::uint32_t magnitude = cell % kMagnitudes;
      const double least = magnitude_of(magnitude), most = magnitude_of(magnitude + 1);
      spread(made, width, static_cast<double>(cells[cell]), std::clamp(negative ? -most : least, made.min, made.max),
             std::clamp(negative ? -least : most, made.min, made.max));
    }
  } else {
    made.limits = {made.max};
    made.counts = {static_cast<double>(made.count)};
  }
  made.min *= factor, made.max *= factor, made.sum *= factor, made.squares *= factor * factor;
  for (double& limit : made.limits) limit *= factor;
  return made;
}

}  // namespace lockstep::trainer
