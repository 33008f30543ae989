// The rate of multiply-adds of one core: what its products of matrices cannot exceed.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstddef>

#include "base/cpu.h"
#include "bench/ceilings.h"
#include "lockstep/base/deadline.h"

namespace lockstep::bench {
namespace {

// Independent sums, more than an addition's latency times the number of units that start one in each cycle (4 or 5
// cycles, 2 units), and yet few enough for the registers.
constexpr std::size_t kSums = 12;

#if defined(__x86_64__)

/// Each returns a value that depends on all of `rounds` times kSums multiply-adds of its width.
__attribute__((target("avx512f"))) float multiply_add_512(std::size_t rounds) {
  __m512 sums[kSums];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (std::size_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, a, b);
  for (std::size_t i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  float values[16];
  _mm512_storeu_ps(values, sums[0]);
  return values[0] + values[15];
}

__attribute__((target("avx2,fma"))) float multiply_add_256(std::size_t rounds) {
  __m256 sums[kSums];
  for (auto& sum : sums) sum = _mm256_set1_ps(1.0f);
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (std::size_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, a, b);
  for (std::size_t i = 1; i < kSums; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  float values[8];
  _mm256_storeu_ps(values, sums[0]);
  return values[0] + values[7];
}

float multiply_add_128(std::size_t rounds) {
  __m128 sums[kSums];
  for (auto& sum : sums) sum = _mm_set1_ps(1.0f);
  const __m128 a = _mm_set1_ps(0.999f), b = _mm_set1_ps(0.001f);
  for (std::size_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm_add_ps(_mm_mul_ps(sum, a), b);
  for (std::size_t i = 1; i < kSums; ++i) sums[0] = _mm_add_ps(sums[0], sums[i]);
  float values[4];
  _mm_storeu_ps(values, sums[0]);
  return values[0] + values[3];
}

#endif

}  // namespace

std::optional<double> core_multiply_add_rate() {
#if defined(__x86_64__)
  const CpuFeatures has = cpu_features();
  const auto run = has.avx512 ? multiply_add_512 : has.avx2 && has.fma ? multiply_add_256 : multiply_add_128;
  const double lanes = has.avx512 ? 16 : has.avx2 && has.fma ? 8 : 4;
  constexpr std::size_t kRounds = 1'000'000;  // a few milliseconds
  constexpr int kTries = 12;                  // the first ones while the core's clock is still rising
  volatile float kept = 0;                    // so that the compiler leaves no round out
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    const auto begin = Clock::now();
    kept = run(kRounds);
    best = std::max(best, 2 * lanes * static_cast<double>(kSums * kRounds) / seconds_between(begin, Clock::now()));
  }
  static_cast<void>(kept);
  return best;
#else
  return std::nullopt;
#endif
}

}  // namespace lockstep::bench
