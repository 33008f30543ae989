// MPI on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/make_group.h"
#include "comm/mpi/collective_algorithm.h"
#include "comm/process_group.h"
#include "comm/text_exchange.h"

namespace lockstep::comm {

class Engine;
class Session;

/// A progress thread owns MPI from its start to its end, and moves operations on while the caller computes. Worth it
/// where a core is spare; on busy cores it only takes time from the caller.
class ThreadGroup final : public ProcessGroup {
 public:
  ThreadGroup(const World& world, Clock::duration timeout, const Tuning& tuning);
  /// Ends the thread; calls nothing of MPI.
  ~ThreadGroup() override;

  std::string name() const override { return "mpi"; }
  void poll() override { failure_.throw_if_any(); }
  void shutdown() override;

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override;
  bool has_let_go(std::uint64_t sequence) const noexcept override {
    return completed_sequence_.load(std::memory_order_acquire) >= sequence;
  }
  void start(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  enum class Ending { kNone, kFinalize, kAbandon };

  void run(const World& world, const Tuning& tuning);
  void serve(Session& session, Engine& engine);
  Ending take_orders(Engine& engine);
  void publish(const Engine& engine);
  void end_thread(Ending ending);
  std::uint64_t hand_over(const Op& op);
  template <class Condition>
  void wait_until(Condition&& condition);
  template <class Condition>
  void wait_until(Condition&& condition, Deadline deadline);

  std::mutex mutex_;
  std::condition_variable orders_;  // issued_ or ending_ has changed
  // Guarded by mutex_:
  std::vector<Op> issued_;    // not yet taken by the thread
  std::uint64_t handed_ = 0;  // all of them, so far
  Ending ending_ = Ending::kNone;

  std::vector<Op> taken_;  // the thread's; swapped with issued_, so that neither allocates for long

  std::atomic<bool> ready_{false};  // MPI has started
  std::atomic<bool> oversubscribed_{false};
  std::atomic<std::uint64_t> completed_{0};  // op_index
  std::atomic<std::uint64_t> completed_sequence_{0};
  // When the caller's wait began and ends; the thread knows what to say when it is over.
  std::atomic<Clock::rep> wait_begin_{0};
  std::atomic<Clock::rep> wait_end_{kNoWait};
  static constexpr Clock::rep kNoWait = Clock::time_point::max().time_since_epoch().count();

  TextExchange texts_;
  std::thread thread_;
};

}  // namespace lockstep::comm
