// Splits loops over the compute threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace lockstep::nn::cpu {

/// Calls body(begin, end) on disjoint ranges that cover [0, count), each at least `grain` long where possible. The
/// split depends on count, grain and the number of threads alone.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
  const std::int64_t most = std::max<std::int64_t>(1, count / std::max<std::int64_t>(1, grain));
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), most));
  if (threads <= 1) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const std::int64_t t = omp_get_thread_num(), n = omp_get_num_threads();
    const std::int64_t begin = count * t / n, end = count * (t + 1) / n;
    if (begin < end) body(begin, end);
  }
}

}  // namespace lockstep::nn::cpu
