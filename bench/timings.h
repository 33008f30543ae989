// Repeated timings of something that all ranks do together, and how they are printed.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/statistics.h"

namespace lockstep::bench {

enum class Format : std::uint8_t { kTable, kCsv, kJson };

/// To one part in `places` of 1: four places unless asked for others.
inline double rounded(double value, double places = 1e4) { return std::round(value * places) / places; }

}  // namespace lockstep::bench
