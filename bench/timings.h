// Repeated timings of something that all ranks do together.
#pragma once

#include <span>
#include <vector>

#include "comm/process_group.h"

namespace lockstep::bench {

/// Collective: element by element the largest of all ranks' values, on every rank: a step that all take together is as
/// long as the slowest one's. All ranks pass equally many.
std::vector<double> slowest(comm::ProcessGroup& group, std::span<const double> mine);

/// The value below which a share `q` in [0, 1] of `values` lies (nearest rank); 0.5 is the median. NaN for none.
double quantile(std::vector<double> values, double q);
inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

}  // namespace lockstep::bench
