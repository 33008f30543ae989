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
  // The writer's.
  alignas(64) std::atomic<std::uint64_t> written;  // bytes, ever
  std::atomic<std::uint64_t> offers;               // Note [Offers], ever
  std::uint64_t offered_address, offered_bytes;    // of the last one
  std::int64_t writer_pid;
  // The reader's.
  alignas(64) std::atomic<std::uint64_t> read;
  std::atomic<std::uint64_t> answers;  // offers that are done with
  std::uint64_t taken_bytes;           // of the last one: all of them, or fewer where the rest cannot be read
  // Its bytes come after it.
};

/// The rings of a host's ranks, as one of them sees them. Each rank's part of the segment has a ring to each rank, its
/// own included, from `offset` on. Not thread-safe.
///
/// Note [Offers]
/// Through a ring every byte is copied twice, and where both ranks send, each of their cores does both. Of many bytes
/// the writer rather says where they are, once the ring has taken what comes before them; the reader, when the ring is
/// empty, copies them from the writer's memory (process_vm_readv), once. The writer waits for the answer before it
/// writes anything else. Where the kernel forbids it (ptrace's rules, seccomp), the reader says so at the first offer,
/// here and in the log, and from then on all bytes to it go through the ring.
class PairRings {
 public:
  /// What they take in each rank's part.
  static std::size_t bytes_of(int ranks);

  /// `board` must outlive it.
  PairRings(int local, int ranks, const Segment& board, std::size_t offset);

  struct Moved {
    std::size_t bytes = 0;
    bool wakes = false;  // the other rank has to look
  };
  /// How many of `bytes`, from their beginning, have been taken. Those that have not are the beginning of the next
  /// call's.
  Moved write_some(int to, std::span<const std::byte> bytes);
  /// How many of `bytes` there were.
  Moved read_some(int from, std::span<std::byte> bytes);

 private:
  static std::size_t capacity_of(int ranks);
  PairRing& ring(int from, int to) const;
  Moved read_offered(int from, std::span<std::byte> bytes);

  const int local_;
  const std::size_t capacity_;  // a power of two
  std::vector<std::byte*> parts_;
  std::vector<bool> offers_, waits_;  // by reader: whether it is made offers; whether the last one has no answer yet
  std::vector<std::size_t> taken_;    // by writer: of the offer that is being read
  bool reported_ = false;             // that another rank's memory cannot be read
};

}  // namespace lockstep::comm
