// Random bits as a pure function of a counter (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014). The bits are part of what lockstep promises to reproduce: they never change.
#pragma once

#include <cstdint>

namespace lockstep {

/// The increment of SplitMix64: 2^64 / golden ratio, odd.
inline constexpr std::uint64_t kSplitMixGamma = 0x9e3779b97f4a7c15u;

/// A bijection of 64-bit words that flips about half of the output bits for any change of the input.
constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// One key from two numbers, such as a seed and an epoch; not symmetric in them.
constexpr std::uint64_t mix64(std::uint64_t a, std::uint64_t b) {
  return mix64(mix64(a + kSplitMixGamma) + (b + 1) * kSplitMixGamma);
}

/// The stream mix64(key + gamma), mix64(key + 2 gamma), …: word n can be had alone, by `word(key, n)`.
class SplitMix64 {
 public:
  explicit constexpr SplitMix64(std::uint64_t key) : state_(key) {}

  static constexpr std::uint64_t word(std::uint64_t key, std::uint64_t n) {
    return mix64(key + (n + 1) * kSplitMixGamma);
  }

  constexpr std::uint64_t next() { return mix64(state_ += kSplitMixGamma); }

  /// Uniform in [0, 1): multiples of 2^-53.
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  /// Uniform in [0, bound), bound ≥ 1, without bias (Lemire, "Fast random integer generation in an interval", 2019).
  constexpr std::uint32_t below(std::uint32_t bound) {
    const std::uint32_t rejected = (0u - bound) % bound;
    while (true) {
      const std::uint64_t product = (next() >> 32) * bound;
      if (static_cast<std::uint32_t>(product) >= rejected) return static_cast<std::uint32_t>(product >> 32);
    }
  }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep
