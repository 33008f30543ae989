#include "comm/shm/pipeline.h"

#include <cstring>

#include "base/error.h"
#include "comm/op.h"
#include "comm/reduce.h"
#include "comm/shm/wakeup.h"

namespace lockstep::comm {

Pipeline::Pipeline(int rank, int size, const Segment& board)
    : rank_(rank), size_(size), sources_(static_cast<std::size_t>(size)), copies_(static_cast<std::size_t>(size)) {
  for (int r = 0; r < size; ++r) controls_.push_back(reinterpret_cast<RankControlBlock*>(board.part(r)));
  entries_.reserve(512);
}

void Pipeline::submit(const Op& op, std::size_t part_bytes) {
  history_ = digest(op, history_);
  Entry& entry = entries_.emplace_back(Entry{op, part_bytes, false});
  entry.op.op_index = submitted_ + 1;
  entry.op.history = history_;
  // The same on all ranks: rank 0's slice is the largest.
  entry.small = op.kind == OpKind::kBarrier ||
                (op.kind == OpKind::kAllGather ? slice_bytes_of(op, 0).bytes : op.bytes()) <= Slot::kBytes;
  ++submitted_;
}

bool Pipeline::advance() {
  if (idle()) return false;
  bool told = false;
  while (posted_ < submitted_ && may_post(posted_ + 1)) {
    post(++posted_);
    told = true;
  }
  if (told) wake_all();
  const std::uint64_t completed = completed_;
  const std::uint64_t worked = worked_;
  while (worked_ < posted_ && all_posted(worked_ + 1)) {
    const std::uint64_t index = worked_ + 1;
    work(entry_of(index), index);
    worked_ = index;
    next_to_post_ = 0;
    control(rank_).finished.store(index, std::memory_order_release);
  }
  if (worked_ != worked) wake_all();
  retire();
  return told || worked_ != worked || completed_ != completed;
}

bool Pipeline::may_post(std::uint64_t index) {
  return index <= RankControlBlock::kSlots || all_finished(index - RankControlBlock::kSlots);
}

void Pipeline::post(std::uint64_t index) {
  const Entry& entry = entry_of(index);
  RankControlBlock& own = control(rank_);
  Slot& slot = own.slot_of(index);
  slot.op = entry.op;
  if (entry.small) {
    const Stretch mine = contribution_of(entry.op, rank_);
    if (mine.bytes > 0) std::memcpy(slot.bytes.data(), entry.op.data + mine.begin, mine.bytes);
  }
  slot.posted.store(index, std::memory_order_release);
  own.posted.store(index, std::memory_order_release);
}

bool Pipeline::all_posted(std::uint64_t index) {
  for (; next_to_post_ < size_; ++next_to_post_)
    if (!has_posted(next_to_post_, index)) return false;
  // A share of something else would read and write where nobody expects it.
  return out_of_step() < 0;
}

bool Pipeline::all_finished(std::uint64_t index) {
  if (finished_by_all_ >= index) return true;
  std::uint64_t least = worked_;
  for (const RankControlBlock* control : controls_)
    least = std::min(least, control->finished.load(std::memory_order_acquire));
  finished_by_all_ = least;
  return least >= index;
}

void Pipeline::work(const Entry& entry, std::uint64_t index) {
  if (entry.small)
    work_from_slots(entry.op, index);
  else
    work_in_place(entry);
}

void Pipeline::work_from_slots(const Op& op, std::uint64_t index) {
  const auto bytes_of = [&](int rank) { return control(rank).slot_of(index).bytes.data(); };
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: {
      const Stretch wanted = op.kind == OpKind::kAllReduce ? Stretch{0, op.bytes()} : slice_bytes_of(op, rank_);
      for (int r = 0; r < size_; ++r) sources_[static_cast<std::size_t>(r)] = bytes_of(r) + wanted.begin;
      reduce_in_order(op.dtype, op.reduce, op.data + wanted.begin, sources_, wanted.bytes / size_of(op.dtype));
      return;
    }
    case OpKind::kAllGather:
    case OpKind::kBroadcast:
      for (int r = 0; r < size_; ++r) {
        const Stretch theirs = contribution_of(op, r);
        if (r != rank_ && theirs.bytes > 0) std::memcpy(op.data + theirs.begin, bytes_of(r), theirs.bytes);
      }
      return;
    case OpKind::kBarrier: return;
  }
}

void Pipeline::work_in_place(const Entry& entry) {
  const Op& op = entry.op;
  const auto copy_of = [&](int rank) {
    return op.data + (rank - rank_) * static_cast<std::ptrdiff_t>(entry.part_bytes);
  };
  switch (op.kind) {
    case OpKind::kAllReduce: return reduce_slice(entry, true);
    case OpKind::kReduceScatter: return reduce_slice(entry, false);
    case OpKind::kAllGather:
      // Each rank begins with another one's slice, so that they do not all read from the same memory.
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        const Stretch slice = slice_bytes_of(op, r);
        std::memcpy(op.data + slice.begin, copy_of(r) + slice.begin, slice.bytes);
      }
      return;
    case OpKind::kBroadcast:
      if (rank_ != op.root) std::memcpy(op.data, copy_of(op.root), op.bytes());
      return;
    case OpKind::kBarrier: return;
  }
}

void Pipeline::reduce_slice(const Entry& entry, bool for_all) {
  const Op& op = entry.op;
  const Stretch slice = slice_bytes_of(op, rank_);
  for (int r = 0; r < size_; ++r) {
    std::byte* copy = op.data + (r - rank_) * static_cast<std::ptrdiff_t>(entry.part_bytes) + slice.begin;
    sources_[static_cast<std::size_t>(r)] = copies_[static_cast<std::size_t>(r)] = copy;
  }
  const std::size_t count = slice.bytes / size_of(op.dtype);
  if (for_all)
    reduce_into_all(op.dtype, op.reduce, copies_, count);
  else
    reduce_in_order(op.dtype, op.reduce, op.data + slice.begin, sources_, count);
}

void Pipeline::retire() {
  while (completed_ < worked_) {
    const Entry& entry = entry_of(completed_ + 1);
    if (!entry.small && !all_finished(completed_ + 1)) break;
    if (entry.op.sequence > 0) completed_sequence_ = entry.op.sequence;
    ++completed_;
    ++head_;
  }
  // Done with a stretch: move what is left to the front, which costs less than has been taken since the last time.
  if (head_ > 0 && head_ * 2 >= entries_.size()) {
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
}

void Pipeline::wake_all() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int r = 0; r < size_; ++r)
    if (r != rank_) wake(control(r));
}

Pipeline::Stretch Pipeline::slice_bytes_of(const Op& op, int rank) const {
  const std::size_t element = size_of(op.dtype);
  const Slice slice = slice_of(op.count, element, rank, size_);
  return {slice.begin * element, slice.count * element};
}

Pipeline::Stretch Pipeline::contribution_of(const Op& op, int rank) const {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: return {0, op.bytes()};
    case OpKind::kAllGather: return slice_bytes_of(op, rank);
    case OpKind::kBroadcast: return rank == op.root ? Stretch{0, op.bytes()} : Stretch{};
    case OpKind::kBarrier: break;
  }
  return {};
}

bool Pipeline::waits_for(int rank) const {
  const std::uint64_t index = completed_ + 1;
  if (rank == rank_) return false;
  if (!has_posted(rank, index)) return true;
  for (int r = 0; r < size_; ++r)
    if (!has_posted(r, index)) return false;
  return control(rank).finished.load(std::memory_order_acquire) < index;
}

int Pipeline::out_of_step() const {
  const std::uint64_t index = worked_ + 1;
  if (index > posted_) return -1;
  const std::uint64_t history = entry_of(index).op.history;
  for (int r = 0; r < size_; ++r)
    if (has_posted(r, index) && control(r).slot_of(index).op.history != history) return r;
  return -1;
}

OpDescriptor Pipeline::posted_instead(int rank) const { return control(rank).slot_of(worked_ + 1).op; }

OpDescriptor Pipeline::last_posted_by(int rank) const {
  return control(rank).slot_of(control(rank).posted.load(std::memory_order_acquire)).op;
}

}  // namespace lockstep::comm
