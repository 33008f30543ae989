#include "comm/hosts/partial.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/cpu.h"
#include "base/dtype.h"
#include "comm/reduce.h"

namespace lockstep::comm {
namespace {

LOCKSTEP_SIMD_CLONES void widen(float* dst, const std::uint16_t* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = std::bit_cast<float>(static_cast<std::uint32_t>(source[i]) << 16);
}

LOCKSTEP_SIMD_CLONES void add_widened(float* dst, const std::uint16_t* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += std::bit_cast<float>(static_cast<std::uint32_t>(source[i]) << 16);
}

/// BFloat16::from_float().
LOCKSTEP_SIMD_CLONES void round_to(std::uint16_t* dst, const float* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(source[i]);
    const std::uint32_t rounded = source[i] != source[i] ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    dst[i] = static_cast<std::uint16_t>(rounded >> 16);
  }
}

// Pieces that stay in the first cache.
constexpr std::size_t kPiece = 1024;

}  // namespace

void reduce_partial(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                    std::size_t count) {
  if (!widened) return reduce_in_order(dtype, op, dst, sources, count);
  auto* const sums = reinterpret_cast<float*>(dst);
  const auto values_of = [](const std::byte* source) { return reinterpret_cast<const std::uint16_t*>(source); };
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t n = count - at < kPiece ? count - at : kPiece;
    widen(sums + at, values_of(sources[0]) + at, n);
    for (std::size_t r = 1; r < sources.size(); ++r) add_widened(sums + at, values_of(sources[r]) + at, n);
  }
}

void reduce_partials(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count) {
  if (!widened) return reduce_in_order(dtype, op, dst, sources, count);
  alignas(64) float sums[kPiece];
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t n = count - at < kPiece ? count - at : kPiece;
    std::memcpy(sums, sources[0] + at * sizeof(float), n * sizeof(float));
    for (std::size_t r = 1; r < sources.size(); ++r) {
      const auto* const values = reinterpret_cast<const float*>(sources[r]) + at;
      for (std::size_t i = 0; i < n; ++i) sums[i] += values[i];
    }
    round_to(reinterpret_cast<std::uint16_t*>(dst) + at, sums, n);
  }
}

}  // namespace lockstep::comm
