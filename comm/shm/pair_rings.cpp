#include "comm/shm/pair_rings.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lockstep::comm {
namespace {

// Of all rings from one rank, and of one: what is in it should still be in the cache when it is read.
constexpr std::size_t kRankBytes = 512 << 10;
constexpr std::size_t kMostBytes = 128 << 10, kLeastBytes = 4 << 10;

}  // namespace

std::size_t PairRings::capacity_of(int ranks) {
  return std::clamp(std::bit_floor(kRankBytes / static_cast<std::size_t>(ranks)), kLeastBytes, kMostBytes);
}

std::size_t PairRings::bytes_of(int ranks) {
  return static_cast<std::size_t>(ranks) * (sizeof(PairRing) + capacity_of(ranks));
}

PairRings::PairRings(int local, int ranks, const Segment& board, std::size_t offset)
    : local_(local), capacity_(capacity_of(ranks)) {
  for (int i = 0; i < ranks; ++i) parts_.push_back(board.part(i) + offset);
}

PairRing& PairRings::ring(int from, int to) const {
  return *reinterpret_cast<PairRing*>(parts_[static_cast<std::size_t>(from)] +
                                      static_cast<std::size_t>(to) * (sizeof(PairRing) + capacity_));
}

std::size_t PairRings::write_some(int to, std::span<const std::byte> bytes) const {
  PairRing& ring = this->ring(local_, to);
  const std::uint64_t written = ring.written.load(std::memory_order_relaxed);
  const std::size_t free = capacity_ - (written - ring.read.load(std::memory_order_acquire));
  const std::size_t count = std::min(free, bytes.size());
  if (count == 0) return 0;
  auto* const memory = reinterpret_cast<std::byte*>(&ring + 1);
  const std::size_t at = written % capacity_, first = std::min(count, capacity_ - at);
  std::memcpy(memory + at, bytes.data(), first);
  std::memcpy(memory, bytes.data() + first, count - first);
  ring.written.store(written + count, std::memory_order_release);
  return count;
}

std::size_t PairRings::read_some(int from, std::span<std::byte> bytes) const {
  PairRing& ring = this->ring(from, local_);
  const std::uint64_t read = ring.read.load(std::memory_order_relaxed);
  const std::size_t there = ring.written.load(std::memory_order_acquire) - read;
  const std::size_t count = std::min(there, bytes.size());
  if (count == 0) return 0;
  const auto* const memory = reinterpret_cast<const std::byte*>(&ring + 1);
  const std::size_t at = read % capacity_, first = std::min(count, capacity_ - at);
  std::memcpy(bytes.data(), memory + at, first);
  std::memcpy(bytes.data() + first, memory, count - first);
  ring.read.store(read + count, std::memory_order_release);
  return count;
}

}  // namespace lockstep::comm
