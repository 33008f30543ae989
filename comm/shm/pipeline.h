// Moves the operations of a group in shared memory on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "comm/op.h"
#include "comm/shm/board.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {

/// Note [Shared memory]
/// An operation has an op_index in the group's order, and goes through four stages on each rank:
///   posted    this rank has come to it: it is in its slot (Note [Slots]), with this rank's bytes if they are few;
///   worked    all ranks have posted it, and this rank has done its share;
///   completed this rank's region is what was promised, and nobody else touches it any more.
/// Few bytes: each rank takes all contributions from the slots, and is complete when it has done its share. Many
/// bytes: each rank reduces its slice_of() everyone's region where it lies, in rank order, and writes the result into
/// all of them (Note [Lines]); that is complete when all ranks have said that they are finished. A rank does its share
/// in one go: put off, it would cost the same core the same time.
///
/// Nothing here blocks. Several operations are under way at once, on regions that do not overlap. No allocation once
/// the queue has been as long as it gets. Not thread-safe; `board` must outlive it, arenas their operations.
class Pipeline {
 public:
  Pipeline(int rank, int size, const Segment& board);

  /// Takes the next operation. `part_bytes` lie between the ranks' copies of its arena.
  void submit(const Op& op, std::size_t part_bytes);
  /// Does what can be done now; whether anything was.
  bool advance();

  /// By op_index: submitted() operations have been taken, completed() are complete.
  std::uint64_t submitted() const { return submitted_; }
  std::uint64_t completed() const { return completed_; }
  bool idle() const { return completed_ == submitted_; }
  /// The sequence number of the last complete operation that has one.
  std::uint64_t completed_sequence() const { return completed_sequence_; }

  /// The first operation that is not complete; there must be one.
  const Op& first() const { return entry_of(completed_ + 1).op; }
  /// Whether `rank` is one of those that it waits for: to post it first of all, else to finish with it.
  bool waits_for(int rank) const;
  /// The first rank that has posted something else under the op_index where this rank has posted contested(); -1 if
  /// none has. The operation will then never be worked on.
  int out_of_step() const;
  const Op& contested() const { return entry_of(worked_ + 1).op; }
  /// What `rank`, which is out of step, has posted instead.
  OpDescriptor posted_instead(int rank) const;
  /// What `rank` has posted last, if anything.
  bool has_posted_any(int rank) const { return control(rank).posted.load(std::memory_order_acquire) > 0; }
  OpDescriptor last_posted_by(int rank) const;

  RankControlBlock& control(int rank) const { return *controls_[static_cast<std::size_t>(rank)]; }

 private:
  struct Entry {
    Op op;
    std::size_t part_bytes = 0;
    bool small = false;
  };

  const Entry& entry_of(std::uint64_t index) const { return entries_[head_ + (index - completed_ - 1)]; }
  bool has_posted(int rank, std::uint64_t index) const {
    return control(rank).slot_of(index).posted.load(std::memory_order_acquire) == index;
  }
  bool may_post(std::uint64_t index);
  void post(std::uint64_t index);
  bool all_posted(std::uint64_t index);
  bool all_finished(std::uint64_t index);
  void work(const Entry& entry, std::uint64_t index);
  void work_from_slots(const Op& op, std::uint64_t index);
  void work_in_place(const Entry& entry);
  void reduce_slice(const Entry& entry, bool for_all);
  void retire();
  void wake_all() const;

  /// What this rank puts into its slot if the operation is small: offset from the region's start, and bytes.
  struct Stretch {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };
  Stretch contribution_of(const Op& op, int rank) const;
  Stretch slice_bytes_of(const Op& op, int rank) const;

  const int rank_;
  const int size_;
  std::vector<RankControlBlock*> controls_;
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<std::byte*> copies_;         // scratch

  std::vector<Entry> entries_;  // taken, not complete: from head_ on
  std::size_t head_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t submitted_ = 0;
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t completed_sequence_ = 0;
  int next_to_post_ = 0;               // ranks before it have posted operation worked_ + 1
  std::uint64_t finished_by_all_ = 0;  // a lower bound, as last read
};

}  // namespace lockstep::comm
