#include "ddp/hooks/compression.h"

#include <bit>
#include <cstdint>

#include "base/cpu.h"
#include "lockstep/comm/arena.h"

namespace lockstep::ddp {
namespace {

template <class T>
LOCKSTEP_SIMD_CLONES void narrow_to(const float* from, float scale, T* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = T::from_float(from[i] * scale);
}

template <class T>
LOCKSTEP_SIMD_CLONES void widen_from(const T* from, float scale, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i].to_float() * scale;
}

/// Magnitudes are ordered as their bits are, infinity and NaN at the end.
LOCKSTEP_SIMD_CLONES std::uint32_t largest_bits(const std::uint32_t* bits, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits[i] & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

LOCKSTEP_SIMD_CLONES std::uint16_t largest_bits(const std::uint16_t* bits, std::size_t count) {
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::uint16_t>(bits[i] & 0x7fffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

}  // namespace

void narrow(const float* from, float scale, BFloat16* to, std::size_t count) { narrow_to(from, scale, to, count); }
void narrow(const float* from, float scale, Float16* to, std::size_t count) { narrow_to(from, scale, to, count); }
void widen(const BFloat16* from, float scale, float* to, std::size_t count) { widen_from(from, scale, to, count); }
void widen(const Float16* from, float scale, float* to, std::size_t count) { widen_from(from, scale, to, count); }

float largest_magnitude(const float* values, std::size_t count) {
  return std::bit_cast<float>(largest_bits(reinterpret_cast<const std::uint32_t*>(values), count));
}

bool all_finite(const Float16* values, std::size_t count) {
  constexpr std::uint16_t kInfinity = 0x7c00;
  return largest_bits(reinterpret_cast<const std::uint16_t*>(values), count) < kInfinity;
}

std::uint64_t bytes_of_halves(std::span<const SlotSpec> slots) {
  std::uint64_t bytes = 0;
  for (const SlotSpec& slot : slots) bytes += comm::align_up(slot.count * sizeof(float)) / 2;
  return bytes;
}

}  // namespace lockstep::ddp
