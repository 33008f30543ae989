// Splits loops over the compute threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "base/signals.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace lockstep::nn::cpu {

/// Note [OpenMP under ThreadSanitizer]
/// libgomp is not built with ThreadSanitizer. So ThreadSanitizer does not know the order: first the caller's work
/// before a region, then the region's threads, then the caller's work after it. It would report every array that the
/// threads fill. These functions declare the order. In other builds they do nothing.
inline char region_begins;  // of all regions: a thread learns only from memory which one runs
#if defined(__SANITIZE_THREAD__)
#define LOCKSTEP_TSAN_UNCHECKED [[gnu::no_sanitize("thread")]]
inline void tsan_release(char* tag) { __tsan_release(tag); }
inline void tsan_acquire(char* tag) { __tsan_acquire(tag); }
#else
#define LOCKSTEP_TSAN_UNCHECKED
inline void tsan_release(char*) {}
inline void tsan_acquire(char*) {}
#endif

/// Calls body(thread, number of threads) on so many threads, the calling one among them; OpenMP may give fewer. Those
/// that it starts take no signals (Note [Signals]). The compiler's own writes for the region are unchecked: they follow
/// the only place where the order could be declared.
template <class Body>
LOCKSTEP_TSAN_UNCHECKED void on_threads(int threads, const Body& body) {
  [[maybe_unused]] char ends = 0;
  const SignalsBlocked inherited;
  tsan_release(&region_begins);
#pragma omp parallel num_threads(threads)
  {
    tsan_acquire(&region_begins);
    body(omp_get_thread_num(), omp_get_num_threads());
    tsan_release(&ends);
  }
  tsan_acquire(&ends);
}

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
  on_threads(threads, [&](std::int64_t t, std::int64_t n) {
    const std::int64_t begin = count * t / n, end = count * (t + 1) / n;
    if (begin < end) body(begin, end);
  });
}

}  // namespace lockstep::nn::cpu
