// Compiled without contraction of a product and a sum into one operation, which some instruction sets have and others
// have not: what all ranks compute for themselves must be the same bits.
#include "ddp/hooks/compression.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/cpu.h"
#include "base/splitmix.h"

namespace lockstep::ddp {
namespace {

// Sums are made in so many parts, whatever the vectors of the instruction set are.
constexpr std::size_t kParts = 16;

template <class Sum>
Sum sum_of(const std::array<Sum, kParts>& parts) {
  Sum sum = 0;
  for (const Sum part : parts) sum += part;
  return sum;
}

LOCKSTEP_SIMD_CLONES float dot_f32(const float* a, const float* b, std::size_t count) {
  std::array<float, kParts> parts{};
  std::size_t i = 0;
  for (; i + kParts <= count; i += kParts)
    for (std::size_t part = 0; part < kParts; ++part) parts[part] += a[i + part] * b[i + part];
  for (std::size_t part = 0; i < count; ++i, ++part) parts[part] += a[i] * b[i];
  return sum_of(parts);
}

LOCKSTEP_SIMD_CLONES double dot_f64(const float* a, const float* b, std::size_t count) {
  std::array<double, kParts> parts{};
  std::size_t i = 0;
  for (; i + kParts <= count; i += kParts)
    for (std::size_t part = 0; part < kParts; ++part)
      parts[part] += static_cast<double>(a[i + part]) * static_cast<double>(b[i + part]);
  for (std::size_t part = 0; i < count; ++i, ++part)
    parts[part] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum_of(parts);
}

/// to += factor · from.
LOCKSTEP_SIMD_CLONES void add_scaled(float* to, const float* from, float factor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/// to += the sum of four rows, each times its factor.
LOCKSTEP_SIMD_CLONES void add_four(float* to, const float* rows, std::size_t stride, const float* factors,
                                   std::size_t count) {
  const float *a = rows, *b = a + stride, *c = b + stride, *d = c + stride;
  for (std::size_t i = 0; i < count; ++i)
    to[i] += (factors[0] * a[i] + factors[1] * b[i]) + (factors[2] * c[i] + factors[3] * d[i]);
}

void scale(float* values, double factor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(static_cast<double>(values[i]) * factor);
}

/// In (-1, 1).
float random_number(std::uint64_t seed, std::uint64_t index) {
  return static_cast<float>(static_cast<double>(SplitMix64::word(seed, index) >> 11) * 0x1p-52 - 1.0);
}

/// Whether vector `at` is independent of those before it; then it is of length 1, and orthogonal to them.
bool make_orthonormal(float* vectors, std::size_t at, std::size_t length) {
  // What is left of a vector that depends on others is their rounding.
  constexpr double kDependent = 1e-5;
  float* const vector = vectors + at * length;
  const double before = dot_f64(vector, vector, length);
  if (before == 0) return false;
  if (!std::isfinite(before)) {
    std::fill_n(vector, length, std::nanf(""));
    return true;
  }
  scale(vector, 1 / std::sqrt(before), length);
  for (int pass = 0; pass < 2; ++pass) {
    for (std::size_t other = 0; other < at; ++other) {
      const float* const base = vectors + other * length;
      add_scaled(vector, base, static_cast<float>(-dot_f64(base, vector, length)), length);
    }
    const double left = dot_f64(vector, vector, length);
    if (left <= kDependent * kDependent) return false;
    scale(vector, 1 / std::sqrt(left), length);
  }
  return true;
}

}  // namespace

void times(const LowRank& shape, const float* m, const float* q, float* p) {
  for (std::size_t row = 0; row < shape.rows; ++row)
    for (std::size_t k = 0; k < shape.rank; ++k)
      p[k * shape.rows + row] = dot_f32(m + row * shape.columns, q + k * shape.columns, shape.columns);
}

void transposed_times(const LowRank& shape, const float* m, const float* p, float* q) {
  std::fill_n(q, shape.rank * shape.columns, 0.0f);
  std::size_t row = 0;
  for (; row + 4 <= shape.rows; row += 4)
    for (std::size_t k = 0; k < shape.rank; ++k)
      add_four(q + k * shape.columns, m + row * shape.columns, shape.columns, p + k * shape.rows + row, shape.columns);
  for (; row < shape.rows; ++row)
    for (std::size_t k = 0; k < shape.rank; ++k)
      add_scaled(q + k * shape.columns, m + row * shape.columns, p[k * shape.rows + row], shape.columns);
}

void expand(const LowRank& shape, const float* p, const float* q, float* m) {
  for (std::size_t row = 0; row < shape.rows; ++row) {
    float* const to = m + row * shape.columns;
    std::fill_n(to, shape.columns, 0.0f);
    for (std::size_t k = 0; k < shape.rank; ++k)
      add_scaled(to, q + k * shape.columns, p[k * shape.rows + row], shape.columns);
  }
}

void residual(const LowRank& shape, const float* m, const float* p, const float* q, float* e) {
  if (e != m) std::copy_n(m, shape.rows * shape.columns, e);
  for (std::size_t row = 0; row < shape.rows; ++row)
    for (std::size_t k = 0; k < shape.rank; ++k)
      add_scaled(e + row * shape.columns, q + k * shape.columns, -p[k * shape.rows + row], shape.columns);
}

void orthonormalize(float* vectors, std::size_t count, std::size_t length, Dependent dependent, std::uint64_t seed) {
  for (std::size_t at = 0; at < count; ++at) {
    if (make_orthonormal(vectors, at, length)) continue;
    float* const vector = vectors + at * length;
    if (dependent == Dependent::kRandom) {
      for (std::size_t i = 0; i < length; ++i) vector[i] = random_number(seed + at, i);
      if (make_orthonormal(vectors, at, length)) continue;
    }
    std::fill_n(vector, length, 0.0f);
  }
}

}  // namespace lockstep::ddp
