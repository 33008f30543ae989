#include "comm/shm/slot_board.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm {

bool claim_stall_warning(RankControlBlock& first, std::uint64_t index, unsigned times) {
  const std::uint64_t stall = index << 8 | (times & 0xffu);
  std::uint64_t known = first.warned_stall.load(std::memory_order_relaxed);
  while (known < stall)
    if (first.warned_stall.compare_exchange_weak(known, stall, std::memory_order_relaxed)) return true;
  return false;
}

SlotBoard::SlotBoard(int local, int size, const Segment& board) : local_(local), size_(size) {
  for (int i = 0; i < size; ++i) controls_.push_back(reinterpret_cast<RankControlBlock*>(board.part(i)));
}

bool SlotBoard::have_finished(int count, std::uint64_t index, std::uint64_t& known) const {
  if (known >= index) return true;
  std::uint64_t least = control(0).finished.load(std::memory_order_acquire);
  for (int i = 1; i < count; ++i) least = std::min(least, control(i).finished.load(std::memory_order_acquire));
  known = least;
  return least >= index;
}

void SlotBoard::post(const Op& op, std::span<const std::byte> bytes) {
  RankControlBlock& own = control(local_);
  Slot& slot = own.slot_of(op.op_index);
  slot.op = op;
  slot.history.store(op.history, std::memory_order_release);
  if (!bytes.empty()) std::memcpy(slot.bytes.data(), bytes.data(), std::min(bytes.size(), Slot::kBytes));
  slot.posted.store(op.op_index, std::memory_order_release);
  own.posted.store(op.op_index, std::memory_order_release);
}

bool SlotBoard::all_posted(const OpDescriptor& op) const {
  for (int i = 0; i < size_; ++i)
    if (!has_posted(i, op.op_index) || history_of(i, op.op_index) != op.history) return false;
  return true;
}

SlotBoard::Difference SlotBoard::find_difference(std::uint64_t last) const {
  constexpr std::uint64_t kSlots = RankControlBlock::kSlots;
  for (std::uint64_t index = last > kSlots ? last - kSlots + 1 : 1; index <= last; ++index) {
    if (!has_posted(local_, index)) continue;
    // The slots stay until this rank is finished with the operation. Afterwards another rank may put a later one into
    // its slot, once it is finished too: what has been read counts if it was not.
    const bool stays = !has_finished(local_, index);
    for (int i = 0; i < size_; ++i)
      if (has_posted(i, index) && history_of(i, index) != history_of(local_, index) &&
          (stays || !has_finished(i, index)))
        return {i, index};
  }
  return {};
}

std::string SlotBoard::progress_of(int local) const {
  const std::uint64_t last = control(local).posted.load(std::memory_order_acquire);
  if (last == 0) return "it has issued nothing yet";
  return fmt::format("the last that it issued is {}", describe(posted_by(local, last)));
}

// The sleeper writes `asleep` and reads what it waits for; the waker writes that and reads `asleep`. With a full fence
// between the two on both sides, one of them sees the other.

void SlotBoard::wake_sleepers() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int i = 0; i < size_; ++i)
    if (i != local_) wake_if_asleep(i);
}

void SlotBoard::wake(int local) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_if_asleep(local);
}

void SlotBoard::wake_if_asleep(int local) const {
  RankControlBlock& other = control(local);
  if (other.asleep.load(std::memory_order_relaxed) == 0) return;
  other.wakeups.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &other.wakeups, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

std::uint32_t SlotBoard::announce_sleep() const {
  RankControlBlock& own = control(local_);
  const auto ticket = own.wakeups.load(std::memory_order_acquire);
  own.asleep.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return ticket;
}

void SlotBoard::sleep(std::uint32_t ticket, Clock::duration at_most) const {
  const timespec timeout = timespec_of(at_most);
  ::syscall(SYS_futex, &control(local_).wakeups, FUTEX_WAIT, ticket, &timeout, nullptr, 0);
}

}  // namespace lockstep::comm
