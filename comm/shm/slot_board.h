// How the ranks of a host exchange the state of their operations, in memory that all of them have mapped.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/shm/segment.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Note [Slots]
/// Every rank puts each of its operations into one of its slots, that of op_index i into slot i % kSlots, and small
/// contributions with it. `posted` is written last (release): whoever reads the number that it waits for (acquire)
/// reads the history in the same cache line, and the contribution in the next ones; what the operation is only matters
/// to those who find another history than theirs. A slot is taken again when all ranks are finished with the operation
/// that it held, so what a slot says about an unfinished operation is stable.
struct alignas(64) Slot {
  std::atomic<std::uint64_t> posted;   // op_index of `op`; 0: never used
  std::atomic<std::uint64_t> history;  // of `op`, where it is looked at each time

  static constexpr std::size_t kBytes = 1024;
  alignas(64) std::array<std::byte, kBytes> bytes;

  OpDescriptor op;
};

/// What one rank writes and the others read; only `wakeups` and `warned_stall` are written by all.
struct RankControlBlock {
  static constexpr std::size_t kSlots = 16;

  alignas(64) std::atomic<std::uint64_t> finished;  // this rank is finished with others' memory, up to this op_index
  std::atomic<std::uint64_t> stage;                 // of an operation in two levels: SlotBoard::reach_stage()
  std::atomic<std::uint64_t> posted;                // the last op_index that it has taken
  alignas(64) std::atomic<std::uint32_t> asleep;    // it waits to be woken
  std::atomic<std::uint32_t> wakeups;               // a futex
  std::atomic<std::uint64_t> warned_stall;          // on the first rank's: the last stall that a rank has warned of
  std::array<Slot, kSlots> slots;

  Slot& slot_of(std::uint64_t index) { return slots[index % kSlots]; }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "a futex is a plain word");
static_assert(std::is_trivially_destructible_v<RankControlBlock>);

/// Whether this rank is the one of its host that logs the `times`-th warning that operation `index` stalls: true for
/// the first caller alone.
bool claim_stall_warning(RankControlBlock& first, std::uint64_t index, unsigned times);

/// The control blocks of a host's ranks, as one of them sees them. Not thread-safe.
class SlotBoard {
 public:
  /// A RankControlBlock is at the beginning of each rank's part of `board`.
  SlotBoard(int local, int size, const Segment& board);

  /// This rank among those of the host, and how many those are.
  int local() const { return local_; }
  int size() const { return size_; }

  // An operation is posted by each rank that has come to it, and finished by each that has done its share.

  /// Whether its slot is free.
  bool may_post(std::uint64_t index) {
    return index <= RankControlBlock::kSlots ||
           have_finished(size_, index - RankControlBlock::kSlots, finished_by_all_);
  }
  /// `bytes` are for the others to read, at most Slot::kBytes.
  void post(const Op& op, std::span<const std::byte> bytes);
  bool has_posted(int local, std::uint64_t index) const {
    return control(local).slot_of(index).posted.load(std::memory_order_acquire) == index;
  }
  /// Whether all have posted `op`: the same one.
  bool all_posted(const OpDescriptor& op) const;
  /// Two ranks that have posted different operations under one op_index.
  struct Difference {
    int local = -1;  // the other rank; -1: there is none
    std::uint64_t index = 0;
  };
  /// The first difference between this rank and another one, up to operation `last`: unless both of them are finished
  /// with it.
  Difference find_difference(std::uint64_t last) const;
  const OpDescriptor& posted_by(int local, std::uint64_t index) const { return control(local).slot_of(index).op; }
  std::uint64_t history_of(int local, std::uint64_t index) const {
    return control(local).slot_of(index).history.load(std::memory_order_acquire);
  }
  const std::byte* bytes_of(int local, std::uint64_t index) const { return control(local).slot_of(index).bytes.data(); }

  void finish(std::uint64_t index) { control(local_).finished.store(index, std::memory_order_release); }
  bool has_finished(int local, std::uint64_t index) const {
    return control(local).finished.load(std::memory_order_acquire) >= index;
  }
  bool all_finished(std::uint64_t index) { return have_finished(size_, index, finished_by_all_); }

  // An operation in two levels (Note [Two levels]) has stages 1 and 2 before it is finished.
  void reach_stage(std::uint64_t index, unsigned stage) {
    control(local_).stage.store(stage_number(index, stage), std::memory_order_release);
  }
  bool has_reached(int local, std::uint64_t index, unsigned stage) const {
    return control(local).stage.load(std::memory_order_acquire) >= stage_number(index, stage);
  }

  /// "the last that it issued is barrier #7".
  std::string progress_of(int local) const;
  /// See Note [Stall notices].
  bool claim_stall_warning(std::uint64_t index, unsigned times) const {
    return comm::claim_stall_warning(control(0), index, times);
  }

  // Sleeping on the futex until another rank wakes this one.

  /// Wakes those who sleep, after what they may wait for has been written.
  void wake_sleepers() const;
  /// That one alone, if it sleeps.
  void wake(int local) const;
  /// Announces that this rank is about to sleep; the ticket for sleep(). What it waits for must be looked at again
  /// between the two: whoever writes it later wakes this rank.
  std::uint32_t announce_sleep() const;
  /// Returns when it has been woken since announce_sleep(), after `at_most`, or for no reason.
  void sleep(std::uint32_t ticket, Clock::duration at_most) const;
  void end_sleep() const { control(local_).asleep.store(0, std::memory_order_relaxed); }

 protected:
  RankControlBlock& control(int local) const { return *controls_[static_cast<std::size_t>(local)]; }
  /// Of the first `count` ranks; `known` is a lower bound, as last read.
  bool have_finished(int count, std::uint64_t index, std::uint64_t& known) const;

 private:
  void wake_if_asleep(int local) const;
  static std::uint64_t stage_number(std::uint64_t index, unsigned stage) { return 4 * index + stage; }

  const int local_;
  const int size_;
  std::vector<RankControlBlock*> controls_;
  std::uint64_t finished_by_all_ = 0;
};

}  // namespace lockstep::comm
