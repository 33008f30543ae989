// What moves a group's operations on: one interface over shared memory, sockets and MPI's messages; and groups that an
// engine serves.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/pairs.h"
#include "comm/stall.h"
#include "comm/store.h"
#include "comm/wait.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/arena.h"
#include "lockstep/comm/op.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Note [Engines]
/// An engine takes operations, gives each the next op_index, and moves them on when advance() is called; it has no
/// thread and blocks nowhere but in sleep(). Who calls it is the driver's business (Note [Drivers]): the thread
/// that issues the operations, at tape nodes and in waits, or a thread of the group. One thread uses an engine, but for
/// wake_up() and what is said to be for the caller of a group.
///
/// No allocation once the queue, and what the engine keeps beside it, have been as large as they get. Arenas must
/// outlive their operations.
class Engine : protected PairStreams, protected StallReports {
 public:
  /// An exchange of short texts, collective and blocking: every rank's on every rank, by rank. With `within_host` it is
  /// among the ranks of each host alone; the texts of others are then meaningless.
  using TextExchange = FunctionRef<std::vector<std::string>(const std::string& mine, bool within_host)>;

  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // For the caller of a group.

  virtual const char* name() const = 0;
  /// ProcessGroup's.
  virtual bool encrypts() const { return false; }
  virtual std::size_t preferred_bucket_bytes() const { return std::size_t{25} << 20; }
  /// Whether the ranks of this machine may run on fewer cores than they are.
  virtual bool oversubscribed() const = 0;
  virtual bool sees_all_copies() const { return false; }
  virtual std::vector<int> ranks_by_host() const { return {}; }
  /// ProcessGroup's, from whichever thread.
  virtual std::vector<ProcessGroup::PeerTime> sending_times() const { return {}; }
  /// Collective; ProcessGroup::map_arena(). `exchange` issues operations.
  virtual std::unique_ptr<Arena> map_arena(std::size_t bytes, TextExchange exchange) = 0;

  static constexpr std::size_t kTextBytes = 256;  // with its end
  /// The operation that spreads `mine`, shorter than kTextBytes; one at a time.
  Op text_op(const std::string& mine, bool within_host);
  /// Every rank's, when it is complete.
  std::vector<std::string> texts() const;

  /// Ends sleep(), from whichever thread.
  virtual void wake_up() const {}

  // For the driver.

  /// Takes the next operation; returns its op_index.
  std::uint64_t submit(const Op& op);
  /// PairQueues'.
  bool transfer_at_once(const PairTransfer& transfer) { return pairs_.move_at_once(transfer); }
  /// Takes a send or a receive, which is no operation of the group (Note [Pairs]).
  void submit(std::shared_ptr<PairTransfer> transfer) { pairs_.add(std::move(transfer)); }
  /// Does what can be done now; whether anything was. Throws what a group ends with.
  bool advance();
  /// Of sends alone.
  void advance_sends() { pairs_.advance_sends(); }

  /// The op_index of the last operation that has been taken, and of the last that is complete.
  std::uint64_t submitted() const { return submitted_; }
  std::uint64_t completed() const { return completed_; }
  /// The sequence number of the last complete operation that has one.
  std::uint64_t completed_sequence() const { return completed_sequence_; }
  /// Whether no operation is under way.
  bool idle() const { return completed_ == submitted_; }
  /// Whether no send or receive is.
  bool has_no_transfers() const { return pairs_.idle(); }
  /// Whether nothing is under way.
  bool is_quiet() const { return idle() && has_no_transfers(); }
  /// Whether `transfer`, of which nothing is read, is one of those under way.
  bool has(const PairTransfer* transfer) const { return pairs_.has(transfer); }

  /// How a driver waits that calls advance() meanwhile: the caller itself, or a thread of the group.
  virtual WaitPolicy wait_policy(bool by_thread) const = 0;
  /// Sleeps until something may have changed, at most `at_most`. Returns at once if `awake()`, which is checked after
  /// wake_up() is armed. `idle` is the time without any change so far.
  virtual void sleep(Clock::duration at_most, Clock::duration idle, FunctionRef<bool()> awake) = 0;

  /// check_peers() and check_transfers().
  void check() {
    check_peers();
    check_transfers();
  }
  /// To be called now and then: throws what has ended the group, or will, as far as can be known without waiting.
  virtual void check_peers() {}
  /// For a rank that waits by other means, beside check_peers(): throws if another rank is known to have ended.
  virtual void check_ended_peers() {}
  /// For a rank that waits, too: finds out why nothing moves, and logs the reason after a long wait.
  void watch_stall();
  /// Throws the TimeoutError for a wait that has lasted so long; there is an operation that is not complete.
  [[noreturn]] void time_out(double waited_seconds);

  // The same for sends and receives.

  /// Throws where a rank that one of them waits for has ended.
  void check_transfers();
  /// For a rank that waits for `transfer`, which is one of them: logs that if nothing has moved for long.
  void watch_stall_of(const PairTransfer& transfer);
  [[noreturn]] void time_out(const PairTransfer& transfer, double waited_seconds);
  /// After all ranks' last operation: throws OutOfStepError where another rank has sent what this one has not received.
  void check_all_received();

  /// Reports this rank's failure to the others, where they need to know it.
  virtual void announce_abort(const std::exception_ptr& failure) { static_cast<void>(failure); }
  /// The orderly end, when all operations are complete.
  virtual void leave() {}

 protected:
  Engine(int rank, int size, StallDiagnosis::Patience patience = {});

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// advance() for operations.
  virtual bool advance_operations() = 0;
  virtual const JobRanks& job_ranks() const = 0;
  std::string suspect_text(int rank) const override { return name_of(rank); }
  int job_rank(int rank) const final { return job_ranks().of(rank); }
  /// Changes when an operation moves.
  virtual std::uint64_t progress() const { return completed_; }
  /// For a rank that waits: compares its operation with those in which the others wait. Throws OutOfStepError.
  virtual void compare_waits() {}
  /// Whether the other rank of a transfer, which waits for it, is known to have ended, or the way to it to be lost.
  virtual bool is_gone(const PairTransfer& transfer) { return static_cast<void>(transfer), false; }
  /// Says so.
  [[noreturn]] virtual void throw_gone(const PairTransfer& transfer);
  /// Why there is no way to it yet, if that is known; empty: there is one.
  virtual std::string trouble_with(int peer) const { return static_cast<void>(peer), std::string(); }

  /// An operation that is taken and not complete; a reference to one is good until the next is complete or taken.
  const Op& op_at(std::uint64_t op_index) const { return queue_[head_ + (op_index - completed_ - 1)]; }
  /// The first of them; there must be one.
  const Op& first() const { return op_at(completed_ + 1); }
  /// `at_once`: what this rank did for it took no time, if it was taken just now.
  void complete_first(bool at_once = false);

  /// Where texts lie, other than in memory of this process alone.
  void put_texts(std::byte* texts, std::size_t stride_bytes);
  std::byte* text_of(int rank) const { return texts_ + static_cast<std::size_t>(rank) * kTextBytes; }
  /// What has to stay while an exchange is under way.
  std::shared_ptr<void> texts_memory() const { return texts_memory_; }

 private:
  const int rank_;
  const int size_;
  const std::uint16_t flight_group_;  // its number among the process's engines
  PairQueues pairs_;
  StallDiagnosis stall_;
  StallNotice transfers_stall_;
  std::vector<Op> queue_;  // taken, not complete: from head_ on
  std::size_t head_ = 0;
  std::uint64_t history_ = 0;
  std::uint64_t submitted_ = 0;
  std::uint64_t taken_now_ = 0;  // the op_index of the last, until the next advance() has returned
  std::uint64_t completed_ = 0;
  std::uint64_t completed_sequence_ = 0;
  std::shared_ptr<std::vector<std::byte>> texts_memory_;
  std::byte* texts_;
  std::size_t texts_stride_ = 0;
};

/// Note [Drivers]
/// There are two drivers, each for every engine. Inline: operations move on whenever the caller issues, polls (as it
/// does at tape nodes), asks or waits; what has been issued earlier than it is needed absorbs the difference between
/// fast and slow ranks all the same. By a thread: a thread of the group moves them on while the caller computes, and
/// sleeps while nothing comes. That is worth it where a core is spare; on busy cores it only takes time from the
/// caller.

/// A group that takes `engine`, and `store`, which its shutdown() ends after the engine; there may be none.
std::unique_ptr<ProcessGroup> make_inline_group(int rank, int size, std::unique_ptr<Engine> engine,
                                                std::unique_ptr<Store> store, Clock::duration timeout);

/// The same with a thread, on which `make` makes the engine, and where that ends too. Throws what `make` throws.
std::unique_ptr<ProcessGroup> make_thread_group(int rank, int size, std::function<std::unique_ptr<Engine>()> make,
                                                std::unique_ptr<Store> store, Clock::duration timeout);

}  // namespace lockstep::comm
