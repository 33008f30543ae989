// Elementary functions that compilers can vectorise, for loops under LOCKSTEP_SIMD_CLONES. NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::nn::cpu {

/// eˣ = 2ⁿ (1 + rest), for |x| < 2^22 ln 2.
struct ReducedExp {
  std::int32_t n;
  float rest;  // eʳ - 1
};

/// x = n ln 2 + r with |r| ≤ ln 2 / 2, and the Taylor series of eʳ - 1, whose eighth term is 2e-10 there.
[[gnu::always_inline]] inline ReducedExp reduced_exp(float x) {
  constexpr float kShift = 0x1.8p23f;  // x + kShift has no bits left for a fraction: it rounds
  const float shifted = x * 1.44269504f + kShift;
  const float n = shifted - kShift;
  // ln 2 in two parts, the first of which has few bits: n times it is exact.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  return {std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kShift), p * r};
}

/// 2ⁿ for -127 < n < 128.
[[gnu::always_inline]] inline float power_of_two(std::int32_t n) { return std::bit_cast<float>((n + 127) << 23); }

/// eˣ within 2 units in the last place where the result is a normal number; below that 0, above f32's range infinity.
[[gnu::always_inline]] inline float exp_of(float x) {
  constexpr float kLeast = -87.33654f, kMost = 88.72283f;
  const float above = x < kLeast ? kLeast : x;
  const ReducedExp reduced = reduced_exp(above > kMost ? kMost : above);
  // 2ⁿ in two factors: n may be 128, for which a float has no exponent.
  const std::int32_t half = reduced.n >> 1;
  const float y = (reduced.rest + 1.0f) * power_of_two(half) * power_of_two(reduced.n - half);
  return x > kMost ? __builtin_inff() : x < kLeast ? 0.0f : y;
}

/// 1 / (1 + e⁻ˣ)
[[gnu::always_inline]] inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

/// tanh x within a few units in the last place: -t / (2 + t) with t = e^(-2 |x|) - 1, which is taken without its 1, so
/// that nothing cancels where x is small.
[[gnu::always_inline]] inline float tanh_of(float x) {
  constexpr float kMost = 20.0f;  // tanh is 1 there
  const float magnitude = x < 0.0f ? -x : x;
  const ReducedExp reduced = reduced_exp(-2.0f * (magnitude > kMost ? kMost : magnitude));
  const float power = power_of_two(reduced.n);
  const float t = power * reduced.rest + (power - 1.0f);
  const float positive = -t / (2.0f + t);
  return x < 0.0f ? -positive : positive;
}

/// The normal distribution's function at √2 z, (1 + erf(z)) / 2, given density = exp(-z²), within 1e-7: equation 7.1.26
/// of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964).
[[gnu::always_inline]] inline float normal_of(float z, float density) {
  const float magnitude = z < 0.0f ? -z : z;
  const float t = 1.0f / (1.0f + 0.3275911f * magnitude);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = 0.5f * p * t * density;  // (1 - erf(|z|)) / 2
  return z < 0.0f ? tail : 1.0f - tail;
}

/// The sum of term(i) over [0, count) in sixteen lanes that are combined in a fixed order: as fast as a processor adds,
/// and the same for all of them.
template <class Term>
[[gnu::always_inline]] inline float lane_sum(std::int64_t count, const Term& term) {
  constexpr std::int64_t kLanes = 16;
  float lane[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::int64_t l = 0; l < kLanes; ++l) lane[l] += term(i + l);
  for (std::int64_t l = 0; i < count; ++i, ++l) lane[l] += term(i);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
    for (std::int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  return lane[0];
}

/// The largest of term(i) over [0, count), at least -infinity; NaN may be passed over.
template <class Term>
[[gnu::always_inline]] inline float lane_max(std::int64_t count, const Term& term) {
  constexpr std::int64_t kLanes = 16;
  float lane[kLanes];
  for (float& l : lane) l = -__builtin_inff();
  const auto larger = [](float a, float b) { return b > a ? b : a; };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::int64_t l = 0; l < kLanes; ++l) lane[l] = larger(lane[l], term(i + l));
  for (std::int64_t l = 0; i < count; ++i, ++l) lane[l] = larger(lane[l], term(i));
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
    for (std::int64_t l = 0; l < width; ++l) lane[l] = larger(lane[l], lane[l + width]);
  return lane[0];
}

}  // namespace lockstep::nn::cpu
