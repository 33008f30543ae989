// The ranks of one host, who move a group's operations on together.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/scope.h"
#include "comm/hosts/message.h"
#include "comm/shm/segment.h"
#include "comm/shm/slot_board.h"

namespace lockstep::comm {

/// What a rank writes and the other ranks of its host read.
struct NodeControlBlock {
  RankControlBlock control;  // first: SlotBoard looks for it there

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

/// Where what a rank keeps in its part of the host's board begins, in bytes, after its NodeControlBlock.
struct HostBoard {
  HostBoard() = default;
  /// Of a group of `ranks`, `here` of them on this host.
  HostBoard(int ranks, int here);

  std::size_t texts = 0;  // of all ranks
  std::size_t rings = 0;  // to the ranks of this host
  std::size_t bytes = 0;  // of all
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

/// The slots of a host's ranks (Note [Slots]), and the rest of their shared state. Ranks sleep in poll(2), so they are
/// woken through pipes. Not thread-safe, but for wake_up(). `board` has a NodeControlBlock in each rank's part.
class IntraHostSync : public SlotBoard {
 public:
  IntraHostSync(int local, int size, int drivers, const Segment& board, WakeupPipes pipes);

  /// The first ranks of the host are connected to other hosts.
  int drivers() const { return drivers_; }
  bool drives() const { return local() < drivers_; }
  /// Whether nobody on this host works on it any more.
  bool drivers_have_finished(std::uint64_t index) { return have_finished(drivers_, index, finished_by_drivers_); }

  // As SlotBoard's.
  void wake_sleepers() const;
  void wake(int local) const;
  void announce_sleep() const;
  void end_sleep() const;
  /// From another thread of this process.
  void wake_up() const;
  /// What sleeps in poll(2) listens to this, too.
  int wakeup_fd() const { return pipes_.fd(); }

  /// Whom this rank waits for in operation `index`, for those who wait for it.
  void blame(std::uint64_t index, const std::vector<int>& ranks) const;
  std::vector<int> blamed_by(int local, std::uint64_t index) const;

  /// The first one stands.
  void announce(const AbortReason& reason) const;
  std::optional<AbortReason> abort_reason() const;

 private:
  void wake_if_asleep(int local) const;
  NodeControlBlock& node(int local) const { return *nodes_[static_cast<std::size_t>(local)]; }

  const int drivers_;
  std::vector<NodeControlBlock*> nodes_;
  WakeupPipes pipes_;
  std::uint64_t finished_by_drivers_ = 0;  // a lower bound, as last read
};

}  // namespace lockstep::comm
