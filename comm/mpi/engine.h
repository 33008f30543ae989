// Moves a group's operations on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "comm/mpi/collective_algorithm.h"
#include "comm/mpi/dissemination_barrier.h"
#include "comm/mpi/exchange.h"
#include "comm/mpi/session.h"
#include "comm/mpi/small_reduce.h"
#include "comm/mpi/stall_watch.h"
#include "comm/mpi/transfers.h"
#include "comm/mpi/tree_broadcast.h"
#include "comm/op.h"
#include "comm/stall_notice.h"

namespace lockstep::comm {

/// How long an operation stands still before the ranks compare where they are (Note [Stalls]): long enough that a slow
/// step is none, and well inside the timeout.
constexpr Clock::duration patience_for(Clock::duration timeout) {
  return std::min<Clock::duration>(std::chrono::seconds(1), timeout / 3);
}

/// Runs operations in their order, a few at a time, all on the thread that owns MPI and none of
/// them blocking: whoever owns the engine calls advance() until what it waits for is complete. After an exception the
/// engine cannot be used any more. The session must outlive it.
class Engine {
 public:
  Engine(const Session& session, const Tuning& tuning, Clock::duration patience);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes the next operation, which gets the next op_index; starts it as soon as there is room.
  void submit(const Op& op);
  /// Does what can be done now; whether anything was. Throws MpiError, and OutOfStepError when bytes
  /// arrive that no operation of this rank expects.
  bool advance();
  /// The op_index of the last operation that has been taken, and of the last that is complete.
  std::uint64_t submitted() const { return submitted_; }
  std::uint64_t completed() const { return completed_; }
  /// The sequence number of the last complete operation that has one.
  std::uint64_t completed_sequence() const { return completed_sequence_; }
  bool idle() const { return completed_ == submitted_; }

  /// To be called now and then while advance() finds nothing to do. Throws OutOfStepError (Note [Stalls]); says so when
  /// nothing has moved for long (Note [Stall notices]).
  void watch_for_stalls();

  /// Throws the TimeoutError for a wait that began `waited_seconds` ago.
  [[noreturn]] void time_out(double waited_seconds);

  /// Before the session is finalised.
  void abandon_notices() { stall_watch_.abandon_notices(); }

 private:
  /// Room for one operation, of any kind.
  struct Slot {
    Slot(int rank, int size, const Tuning& tuning, Transfers& transfers)
        : exchange(rank, size, tuning, transfers),
          small_reduce(rank, size, tuning, transfers),
          broadcast(rank, size, tuning, transfers),
          barrier(rank, size, tuning, transfers) {}
    Exchange exchange;
    SmallReduce small_reduce;
    TreeBroadcast broadcast;
    DisseminationBarrier barrier;
    CollectiveAlgorithm* active = nullptr;
  };

  Slot& slot_of(std::uint64_t index) { return *slots_[index % slots_.size()]; }
  CollectiveAlgorithm& algorithm_for(Slot& slot, const Op& op);
  void begin_waiting();
  void retire();
  void mention_stall(const CollectiveAlgorithm& first, Clock::time_point now);
  const CollectiveAlgorithm& first_under_way() { return *slot_of(completed_ + 1).active; }

  const Tuning tuning_;
  const std::size_t small_limit_;
  const Clock::duration patience_;
  Transfers transfers_;
  StallWatch stall_watch_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Op> waiting_;  // submitted, not begun: from next_waiting_ on
  std::size_t next_waiting_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t submitted_ = 0;
  std::uint64_t begun_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t completed_sequence_ = 0;

  Clock::time_point last_look_;  // of watch_for_stalls
  Clock::time_point next_check_;
  std::uint64_t moves_ = 0;
  StallNotice stall_;
  bool due_ = false;
  std::vector<int> suspects_;       // whom this rank will say that it waits for
  Clock::time_point confirm_at_{};  // if they are still silent then
};

}  // namespace lockstep::comm
