#include "bench/timings.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep::bench {

std::vector<double> slowest(comm::ProcessGroup& group, std::span<const double> mine) {
  const auto arena = group.allocate(mine.size_bytes());
  const auto values = arena->view<double>(0, mine.size());
  std::ranges::copy(mine, values.begin());
  group.all_reduce({.arena = arena.get(), .count = mine.size(), .dtype = DType::kF64}, comm::ReduceOp::kMax)
      .wait_host();
  return {values.begin(), values.end()};
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::lround(q * last));
  std::ranges::nth_element(values, at);
  return *at;
}

}  // namespace lockstep::bench
