// What the ranks of a host tell each other, in memory that all of them have mapped.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/op.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {

/// Note [Slots]
/// Every rank puts each of its operations into one of its slots, that of op_index i into slot i % kSlots, and small
/// contributions with it. `posted` is written last (release): whoever reads the number that it waits for (acquire)
/// reads the history in the same cache line, and the contribution in later ones; what the operation is only matters to
/// those who find another history than theirs. A slot is taken again when all ranks are finished with the operation
/// that it held, so what a slot says about an unfinished operation is stable.
struct alignas(64) Slot {
  std::atomic<std::uint64_t> posted;  // op_index of `op`; 0: never used
  OpDescriptor op;

  static constexpr std::size_t kBytes = 1024;
  alignas(64) std::array<std::byte, kBytes> bytes;
};
static_assert(offsetof(Slot, op) + offsetof(OpDescriptor, history) + sizeof(std::uint64_t) <= 64);

/// What one rank writes and the others read; only `wakeups` and `mentioned` are written by all.
struct RankControlBlock {
  static constexpr std::size_t kSlots = 16;

  alignas(64) std::atomic<std::uint64_t> finished;  // this rank is finished with others' memory, up to this op_index
  std::atomic<std::uint64_t> posted;                // the last op_index that it has taken
  alignas(64) std::atomic<std::uint32_t> asleep;    // it waits to be woken
  std::atomic<std::uint32_t> wakeups;               // a futex
  std::atomic<std::uint64_t> mentioned;             // on the first rank's: the last stall that a rank has spoken of
  std::array<Slot, kSlots> slots;

  Slot& slot_of(std::uint64_t index) { return slots[index % kSlots]; }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "a futex is a plain word");
static_assert(std::is_trivially_destructible_v<RankControlBlock>);

/// Whether no rank of the host has said yet, for the `times`-th time, that operation `index` stands still: now this one
/// has.
inline bool claim_mention(RankControlBlock& first, std::uint64_t index, unsigned times) {
  const std::uint64_t stall = index << 8 | (times & 0xffu);
  std::uint64_t known = first.mentioned.load(std::memory_order_relaxed);
  while (known < stall)
    if (first.mentioned.compare_exchange_weak(known, stall, std::memory_order_relaxed)) return true;
  return false;
}

}  // namespace lockstep::comm
