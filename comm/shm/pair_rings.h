// Streams between two ranks of a host, in memory that both have mapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/shm/segment.h"

namespace lockstep::comm {

/// A ring of bytes from one rank to another one: the one writes, the other reads.
struct PairRing {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes, ever
  alignas(64) std::atomic<std::uint64_t> read;
  // Its bytes come after it.
};

/// The rings of a host's ranks, as one of them sees them. Each rank's part of the segment has a ring to each rank, its
/// own included, from `offset` on. Not thread-safe.
class PairRings {
 public:
  /// What they take in each rank's part.
  static std::size_t bytes_of(int ranks);

  /// `board` must outlive it.
  PairRings(int local, int ranks, const Segment& board, std::size_t offset);

  /// How many of `bytes`, from their beginning, fitted.
  std::size_t write_some(int to, std::span<const std::byte> bytes) const;
  /// How many of `bytes` there were.
  std::size_t read_some(int from, std::span<std::byte> bytes) const;

 private:
  static std::size_t capacity_of(int ranks);
  PairRing& ring(int from, int to) const;

  const int local_;
  const std::size_t capacity_;  // a power of two
  std::vector<std::byte*> parts_;
};

}  // namespace lockstep::comm
