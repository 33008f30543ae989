// A group on several hosts with a thread of its own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/hosts/hosts_group.h"

namespace lockstep::comm {

/// A progress thread moves operations on while the caller computes, and sleeps in poll(2) while nothing comes. Worth it
/// where a core is spare.
class ThreadHosts final : public HostsGroup {
 public:
  ThreadHosts(std::unique_ptr<Store> store, HostMeeting met, Clock::duration timeout);
  ~ThreadHosts() override;

  void poll() override { failure_.throw_if_any(); }
  void shutdown() override;

 protected:
  bool has_let_go(std::uint64_t sequence) const noexcept override {
    return completed_sequence_.load(std::memory_order_acquire) >= sequence;
  }
  std::uint64_t hand_over(const HostEngine::Order& order) override;
  void wait_for_index(std::uint64_t index, Deadline deadline) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  void run();
  void serve();
  bool has_orders() const { return handed_.load(std::memory_order_acquire) != taken_count_ || ending_; }
  void take_orders();
  void publish();
  void end_thread();
  template <class Condition>
  void wait_until(Condition&& done, Deadline deadline);

  std::mutex mutex_;
  std::vector<HostEngine::Order> issued_;  // not yet taken by the thread; guarded by mutex_
  std::vector<HostEngine::Order> taken_;   // the thread's; swapped with issued_, so that neither allocates for long
  std::atomic<std::uint64_t> handed_{0};
  std::uint64_t taken_count_ = 0;  // the thread's
  std::atomic<bool> ending_{false};

  std::atomic<std::uint64_t> completed_{0};
  std::atomic<std::uint64_t> completed_sequence_{0};
  // When the caller's wait began and ends; the thread knows what to say when it is over.
  std::atomic<Clock::rep> wait_begin_{0};
  std::atomic<Clock::rep> wait_end_{kNoWait};
  static constexpr Clock::rep kNoWait = Clock::time_point::max().time_since_epoch().count();

  std::thread thread_;
};

}  // namespace lockstep::comm
