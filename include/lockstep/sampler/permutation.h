// A random order of [0, length) that can be asked for any single position.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::sampler {

/// A bijection of [0, length), keyed by (seed, epoch). Const members may run concurrently. One that was moved from is
/// assigned before it is used.
///
/// From kTableBelow on it is a Feistel network over the smallest power of two that holds `length`, walked until it
/// lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): constant memory and less than two
/// walks on average at any length. Shorter lengths, where a network of so few bits is visibly biased, are shuffled
/// outright (Fisher–Yates) into a table of at most 8 KB.
///
/// The order is part of what a run reproduces: the same (length, seed, epoch) gives the same order for ever.
class Permutation {
 public:
  static constexpr std::uint64_t kTableBelow = 4096;

  /// Requires length ≥ 1 (else InternalError).
  Permutation(std::uint64_t length, std::uint64_t seed, std::uint64_t epoch);
  /// Becomes Permutation(length(), seed, epoch), without allocating.
  void restart(std::uint64_t seed, std::uint64_t epoch);

  std::uint64_t length() const { return length_; }

  /// The sample at position i < length() (else InternalError).
  std::uint64_t operator()(std::uint64_t i) const;

 private:
  static constexpr int kRounds = 8;

  std::uint64_t encrypt(std::uint64_t x) const;

  std::uint64_t length_;
  std::vector<std::uint16_t> table_;  // empty where the network is used
  std::array<std::uint64_t, kRounds> round_keys_{};
  int low_bits_ = 0;
  std::uint64_t low_mask_ = 0;
  std::uint64_t high_mask_ = 0;
};

}  // namespace lockstep::sampler
