#include "simulate/failures.h"

#include <cmath>
#include <limits>

namespace lockstep::simulate {
namespace {

double mean_time(const Failures& failures, int nodes) {
  return failures.node_mtbf_s > 0 ? failures.node_mtbf_s / nodes : std::numeric_limits<double>::infinity();
}

}  // namespace

double young_interval_s(const Failures& failures, int nodes) {
  return std::sqrt(2 * failures.checkpoint_s * mean_time(failures, nodes));
}

double daly_interval_s(const Failures& failures, int nodes) {
  const double m = mean_time(failures, nodes), d = failures.checkpoint_s;
  if (std::isinf(m)) return m;
  if (d >= 2 * m) return m;
  const double x = d / (2 * m);
  return std::sqrt(2 * d * m) * (1 + std::sqrt(x) / 3 + x / 9) - d;
}

double slowdown(const Failures& failures, int nodes, double interval_s) {
  const double m = mean_time(failures, nodes);
  if (std::isinf(m)) return std::isinf(interval_s) ? 1 : (interval_s + failures.checkpoint_s) / interval_s;
  if (interval_s <= 0) return std::numeric_limits<double>::infinity();
  return m * std::exp(failures.restart_s / m) * std::expm1((interval_s + failures.checkpoint_s) / m) / interval_s;
}

}  // namespace lockstep::simulate
