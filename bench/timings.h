// Repeated timings of something that all ranks do together, and how they are printed.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::bench {

enum class Format : std::uint8_t { kTable, kCsv, kJson };

/// To one part in `places` of 1: four places unless asked for others.
inline double rounded(double value, double places = 1e4) { return std::round(value * places) / places; }

/// Collective: element by element the largest of all ranks' values, on every rank: a step that all take together is as
/// long as the slowest one's. All ranks pass equally many.
std::vector<double> slowest(comm::ProcessGroup& group, std::span<const double> mine);

/// The value below which a share `q` in [0, 1] of `values` lies (nearest rank); 0.5 is the median. NaN for none.
double quantile(std::vector<double> values, double q);
inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

}  // namespace lockstep::bench
