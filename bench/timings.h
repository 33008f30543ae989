// Repeated timings of something that all ranks do together, and how they are printed.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/statistics.h"

namespace lockstep::bench {

enum class Format : std::uint8_t { kTable, kCsv, kJson };

/// To one part in `places` of 1: four places unless asked for others.
inline double rounded(double value, double places = 1e4) { return std::round(value * places) / places; }
/// To four digits from the first that is not 0: of shares, which may be small.
inline double rounded_share(double value) {
  return value == 0 ? 0 : rounded(value, std::pow(10.0, 3 - std::floor(std::log10(std::abs(value)))));
}

}  // namespace lockstep::bench
