// A group on several hosts without a thread of its own.
#pragma once

#include <memory>

#include "comm/hosts/hosts_group.h"

namespace lockstep::comm {

/// Operations move on whenever the caller issues, polls, asks or waits; between, the kernel sends and takes what its
/// buffers hold. A wait looks a few times, and then sleeps in poll(2).
class InlineHosts final : public HostsGroup {
 public:
  InlineHosts(std::unique_ptr<Store> store, HostMeeting met, Clock::duration timeout)
      : HostsGroup(std::move(store), std::move(met), timeout) {}

  void poll() override;
  void watch_peers() override;
  void shutdown() override;

 protected:
  bool has_let_go(std::uint64_t sequence) const noexcept override { return engine_.completed_sequence() >= sequence; }
  std::uint64_t hand_over(const HostEngine::Order& order) override;
  void wait_for_index(std::uint64_t index, Deadline deadline) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  /// Failure::guard, and the others are told.
  template <class Action>
  auto guard(Action&& action);
  template <class Condition>
  void wait_until(Condition&& done, Deadline deadline);
  void check_peers_now_and_then();

  Clock::time_point next_look_{};  // of check_peers_now_and_then()
};

}  // namespace lockstep::comm
