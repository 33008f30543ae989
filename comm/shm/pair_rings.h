// Streams between two ranks of a host, in memory that both have mapped.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "comm/shm/segment.h"
#include "comm/shm/slot_board.h"

namespace lockstep::comm {

/// A ring of bytes from one rank to another one: the one writes, the other reads.
struct PairRing {
  /// Note [Offers]
  struct Offer {
    std::uint64_t after;  // so many bytes in the ring
    std::uint64_t address, bytes;
  };
  static constexpr std::size_t kOffers = 32;

  // The writer's.
  alignas(64) std::atomic<std::uint64_t> written;  // bytes, ever
  std::atomic<std::uint64_t> offers;               // ever
  std::int64_t writer_pid;
  std::array<Offer, kOffers> open_offers;  // offer n is at n % kOffers
  // The reader's.
  alignas(64) std::atomic<std::uint64_t> read;
  std::atomic<std::uint64_t> answers;  // offers that are done with
  std::uint64_t taken_bytes;           // of the first one: all of them, or fewer where the rest cannot be read
  // Its bytes come after it.
};

/// The rings of a host's ranks, as one of them sees them. Each rank's part of the segment has a ring to each rank, its
/// own included, from `offset` on. Not thread-safe.
///
/// Note [Offers]
/// Through a ring every byte is copied twice, and where both ranks send, each of their cores does both. Of many bytes
/// the writer rather says where they are; the reader, when it has read what the ring had before, copies them from the
/// writer's memory (process_vm_readv), once. The writer waits for the first answer before it writes anything else.
/// Where the kernel forbids it (ptrace's rules, seccomp), that answer says so, as does the log, and from then on all
/// bytes to this reader go through the ring. Else the writer continues, with up to kOffers offers that have no answer
/// yet; what is offered has to stay until it has one.
class PairRings {
 public:
  /// What they take in each rank's part.
  static std::size_t bytes_of(int ranks);

  /// `board` must outlive it.
  PairRings(int local, int ranks, const Segment& board, std::size_t offset);

  /// How many bytes of `header` and the `values` after it, from their beginning, have been taken. Those that have not
  /// are the beginning of the next call's.
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values);
  /// Whether the first `bytes` that were ever taken for `to` have been copied.
  bool is_flushed(int to, std::uint64_t bytes);
  /// How many of `bytes` there were. DeviceError where what another rank offers cannot be read any more.
  std::size_t read_some(int from, std::span<std::byte> bytes);
  /// After reads and writes: publishes how far this rank has read, and wakes the ranks of `board`, this
  /// host's, that have something to look at.
  void end_round(const SlotBoard& board);

 private:
  /// What this rank writes to another one.
  struct Outgoing {
    enum class Reads { kUnknown, kOffered, kRing } reads = Reads::kUnknown;
    std::uint64_t taken = 0;         // bytes, ever
    std::uint64_t read = 0;          // of those in the ring, when last looked at
    std::deque<std::uint64_t> open;  // offers that have no answer yet: the bytes that were taken before each
  };

  /// What it reads of another one.
  struct Incoming {
    std::uint64_t read = 0, end = 0;  // in the ring, ever: what has been read; what could be when last looked at
    std::size_t copied = 0;           // of the offer that is being read
  };

  static std::size_t capacity_of(int ranks);
  PairRing& ring(int from, int to) const;
  void take_answers(Outgoing& out, const PairRing& ring);
  std::size_t copy_some(int to, std::span<const std::byte> header, std::span<const std::byte> values);
  std::size_t try_offer(int to, std::span<const std::byte> bytes);
  void offer(PairRing& ring, std::span<const std::byte> bytes) const;
  std::size_t read_offered(int from, std::span<std::byte> bytes);

  const int local_;
  const std::size_t capacity_;  // a power of two
  std::vector<std::byte*> parts_;
  std::vector<Outgoing> outgoing_;  // by reader
  std::vector<Incoming> incoming_;  // by writer
  std::vector<bool> has_news_;      // by rank: something that it may wait for
  bool reported_ = false;           // that another rank's memory cannot be read
};

}  // namespace lockstep::comm
