// The ranks of one host, who move a group's operations on together.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "comm/hosts/abort_reason.h"
#include "comm/op.h"
#include "comm/shm/board.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {

/// What a rank writes and the other ranks of its host read.
struct NodeControlBlock {
  RankControlBlock control;  // its operations (Note [Slots]), and whether it sleeps

  /// Whom a rank that is connected to other hosts waits for in its operation `blame_index`.
  static constexpr std::size_t kMostBlamed = 16;
  alignas(64) std::atomic<std::uint64_t> blame_index;
  std::atomic<std::uint32_t> blamed_count;
  std::array<std::atomic<std::int32_t>, kMostBlamed> blamed;

  /// The host's, on its first rank's block: what has ended the group, written once.
  static constexpr std::uint32_t kNoAbort = 0, kAbortBeingWritten = 1, kAbortWritten = 2;
  alignas(64) std::atomic<std::uint32_t> abort_state;
  std::array<char, AbortReason::kMostBytes> reason;
  std::uint32_t abort_bytes;
};

/// Wakes ranks of one host that sleep in poll(2): each has a pipe, whose other end the others open through /proc.
class WakeupPipes {
 public:
  WakeupPipes();
  /// What the others need to find this rank's.
  int number() const { return write_end_.get(); }
  /// Opens that of `local`, which process `pid` knows by `number`. Throws DeviceError.
  void open(std::size_t local, int pid, int number);

  int fd() const { return read_end_.get(); }
  void wake(std::size_t local) const;
  void wake_own() const;
  void drain() const;

 private:
  UniqueFd read_end_, write_end_;
  std::vector<UniqueFd> others_;
};

/// Not thread-safe, but for wake_up(). `board` has a NodeControlBlock in each rank's part.
class IntraHostSync {
 public:
  IntraHostSync(int local, int size, int drivers, const Segment& board, WakeupPipes pipes);

  int local() const { return local_; }
  int size() const { return size_; }
  /// The first ranks of the host are connected to other hosts.
  int drivers() const { return drivers_; }
  bool drives() const { return local_ < drivers_; }

  // An operation is posted by each rank that has come to it, and finished by each that has done its share.
  bool may_post(std::uint64_t index);
  /// `text` is for the others to read, up to Slot::kBytes.
  void post(std::uint64_t index, const Op& op, std::string_view text);
  bool has_posted(int local, std::uint64_t index) const {
    return control(local).slot_of(index).posted.load(std::memory_order_acquire) == index;
  }
  /// Whether all have posted `op` there: the same one.
  bool all_posted(std::uint64_t index, const Op& op) const;
  /// The first that has posted something else there; -1 if none has.
  int posted_otherwise(std::uint64_t index, const Op& op) const;
  const OpDescriptor& posted_by(int local, std::uint64_t index) const { return control(local).slot_of(index).op; }
  bool has_posted_any(int local) const { return control(local).posted.load(std::memory_order_acquire) > 0; }
  const OpDescriptor& last_posted_by(int local) const {
    return posted_by(local, control(local).posted.load(std::memory_order_acquire));
  }
  const std::byte* text_of(int local, std::uint64_t index) const { return control(local).slot_of(index).bytes.data(); }

  void finish(std::uint64_t index) { control(local_).finished.store(index, std::memory_order_release); }
  bool has_finished(int local, std::uint64_t index) const {
    return control(local).finished.load(std::memory_order_acquire) >= index;
  }
  /// Whether nobody on this host works on it any more.
  bool drivers_have_finished(std::uint64_t index);

  /// After what others may wait for has been written.
  void wake_all() const;
  /// From another thread of this process.
  void wake_up() const;
  /// As in shm/wakeup.h. What sleeps in poll(2) listens to wakeup_fd() too.
  void announce_sleep() const;
  void end_sleep() const;
  int wakeup_fd() const { return pipes_.fd(); }

  /// Whom this rank waits for in operation `index`, for those who wait for it.
  void blame(std::uint64_t index, const std::vector<int>& ranks) const;
  std::vector<int> blamed_by(int local, std::uint64_t index) const;

  /// See Note [Stall notices].
  bool claim_mention(std::uint64_t index, unsigned times) const {
    return comm::claim_mention(control(0), index, times);
  }

  /// The first one stands.
  void announce(const AbortReason& reason) const;
  std::optional<AbortReason> abort_reason() const;

 private:
  NodeControlBlock& node(int local) const { return *nodes_[static_cast<std::size_t>(local)]; }
  RankControlBlock& control(int local) const { return node(local).control; }
  bool have_finished(int count, std::uint64_t index, std::uint64_t& known) const;

  const int local_;
  const int size_;
  const int drivers_;
  std::vector<NodeControlBlock*> nodes_;
  WakeupPipes pipes_;
  std::uint64_t finished_by_all_ = 0;  // lower bounds, as last read
  std::uint64_t finished_by_drivers_ = 0;
};

}  // namespace lockstep::comm
