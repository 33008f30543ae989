#include "lockstep/sampler/permutation.h"

#include <bit>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::sampler {

Permutation::Permutation(std::uint64_t length, std::uint64_t seed, std::uint64_t epoch) : length_(length) {
  LOCKSTEP_ASSERT(length >= 1);
  if (length < kTableBelow) {
    table_.resize(length);
  } else {
    const int bits = std::bit_width(length - 1);
    low_bits_ = (bits + 1) / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
  }
  restart(seed, epoch);
}

void Permutation::restart(std::uint64_t seed, std::uint64_t epoch) {
  SplitMix64 random(mix64(seed, epoch));
  if (table_.empty()) {
    for (auto& key : round_keys_) key = random.next();
    return;
  }
  std::iota(table_.begin(), table_.end(), std::uint16_t{0});
  for (auto i = static_cast<std::uint32_t>(length_); i > 1; --i) std::swap(table_[i - 1], table_[random.below(i)]);
}

// A Feistel network: the halves are masked alternately, each by a keyed hash of the other. Their widths may differ.
// Each round is its own inverse, so the whole is a bijection of [0, 2^bits).
std::uint64_t Permutation::encrypt(std::uint64_t x) const {
  std::uint64_t low = x & low_mask_;
  std::uint64_t high = x >> low_bits_;
  for (int round = 0; round < kRounds; round += 2) {
    high ^= mix64(low ^ round_keys_[round]) & high_mask_;
    low ^= mix64(high ^ round_keys_[round + 1]) & low_mask_;
  }
  return high << low_bits_ | low;
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  LOCKSTEP_ASSERT(i < length_, "position {} of {}", i, length_);
  if (!table_.empty()) return table_[i];
  do {
    i = encrypt(i);
  } while (i >= length_);
  return i;
}

}  // namespace lockstep::sampler
