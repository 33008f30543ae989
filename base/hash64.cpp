#include "base/hash64.h"

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15ULL;

// One to one in the lane and in the word: whatever differed before, or differs now, still does.
constexpr std::uint64_t mixed(std::uint64_t lane, std::uint64_t word) {
  const std::uint64_t product = (lane ^ word) * kOdd;
  return product ^ (product >> 32);
}

}  // namespace

// Eight chains of multiplications, which do not wait for each other.
void Hash64::mix(Lanes& lanes, const std::byte* blocks, std::size_t count) {
  Lanes local = lanes;
  for (; count > 0; --count, blocks += kBlockBytes) {
    Lanes words;
    std::memcpy(words.data(), blocks, kBlockBytes);
    for (std::size_t i = 0; i < kLanes; ++i) local[i] = mixed(local[i], words[i]);
  }
  lanes = local;
}

void Hash64::update(std::span<const std::byte> bytes) {
  total_bytes_ += bytes.size();
  if (rest_bytes_ > 0) {
    const std::size_t n = std::min(bytes.size(), kBlockBytes - rest_bytes_);
    std::copy_n(bytes.begin(), n, rest_.begin() + static_cast<std::ptrdiff_t>(rest_bytes_));
    rest_bytes_ += n;
    bytes = bytes.subspan(n);
    if (rest_bytes_ < kBlockBytes) return;
    mix(lanes_, rest_.data(), 1);
    rest_bytes_ = 0;
  }
  const std::size_t blocks = bytes.size() / kBlockBytes;
  mix(lanes_, bytes.data(), blocks);
  bytes = bytes.subspan(blocks * kBlockBytes);
  std::ranges::copy(bytes, rest_.begin());
  rest_bytes_ = bytes.size();
}

std::uint64_t Hash64::finish() {
  std::fill(rest_.begin() + static_cast<std::ptrdiff_t>(rest_bytes_), rest_.end(), std::byte{0});
  mix(lanes_, rest_.data(), 1);
  std::uint64_t hash = total_bytes_;
  for (const std::uint64_t lane : lanes_) hash = mixed(hash, lane);
  return hash;
}

}  // namespace lockstep
