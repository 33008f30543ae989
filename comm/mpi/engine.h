// Operations as messages of MPI.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/engine.h"
#include "comm/mpi/algorithms.h"
#include "comm/mpi/pair_messages.h"
#include "comm/mpi/session.h"
#include "comm/mpi/transfers.h"
#include "comm/mpi/wait_notices.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// Runs operations in their order, a few at a time, as MPI's messages: all on the thread that owns MPI, none of them
/// blocking. After an exception it cannot be used any more.
class MpiEngine final : public Engine {
 public:
  /// `session` must outlive it.
  MpiEngine(const Session& session, const Tuning& tuning, Clock::duration patience);
  /// Takes the session, which leave() ends: for an engine with a thread of its own.
  MpiEngine(std::unique_ptr<Session> session, const Tuning& tuning, Clock::duration patience);
  ~MpiEngine() override;

  const char* name() const override { return "mpi"; }
  bool oversubscribed() const override { return session_.oversubscribed(); }
  std::unique_ptr<Arena> map_arena(std::size_t bytes, TextExchange exchange) override;
  void wake_up() const override;

  WaitPolicy wait_policy(bool by_thread) const override;
  void sleep(Clock::duration at_most, Clock::duration idle, FunctionRef<bool()> awake) override;
  void leave() override;

 private:
  MpiEngine(const Session& session, std::unique_ptr<Session>&& own, const Tuning& tuning, Clock::duration patience);

  /// Throws MpiError, and OutOfStepError when bytes arrive that no operation of this rank expects.
  bool advance_operations() override;
  std::string name_of(int rank) const override { return session_.name_of_rank(rank); }
  std::uint64_t progress() const override { return moves_; }
  /// Throws OutOfStepError (Note [Wait notices]).
  void compare_waits() override;
  void find_states(const Op& op, std::span<PeerState> states) override;
  bool speaks(const Op& op, unsigned) override { return wait_notices_.is_first_to_wait(op); }
  const JobRanks& job_ranks() const override { return session_.job_ranks(); }
  std::size_t write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) override {
    return messages_.write_some(to, header, values);
  }
  std::size_t read_some(int from, std::span<std::byte> bytes) override { return messages_.read_some(from, bytes); }
  bool is_flushed(int to, std::uint64_t) override { return messages_.is_flushed(to); }

  /// Memory for one operation, of any kind.
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
  bool begin_taken();
  void retire();
  const CollectiveAlgorithm& first_under_way() { return *slot_of(completed() + 1).active; }

  const std::unique_ptr<Session> own_session_;
  const Session& session_;
  const Tuning tuning_;
  const std::size_t small_limit_;
  const Clock::duration patience_;
  Transfers transfers_;
  PairMessages messages_;
  WaitNotices wait_notices_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::uint64_t begun_ = 0;
  // What ends the sleep of a thread that has nothing under way.
  mutable std::mutex mutex_;
  mutable std::condition_variable wakeup_;

  Clock::time_point last_look_;  // of compare_waits()
  Clock::time_point next_check_;
  std::uint64_t moves_ = 0;
};

}  // namespace lockstep::comm
