// MPI without a thread of its own.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "comm/make_group.h"
#include "comm/mpi/engine.h"
#include "comm/mpi/session.h"
#include "comm/process_group.h"

namespace lockstep::comm {

/// The calling thread owns MPI. Operations move on whenever it issues, polls, asks or waits; what has been issued
/// earlier than it is needed absorbs the difference between fast and slow ranks all the same.
class InlineGroup final : public ProcessGroup {
 public:
  InlineGroup(const World& world, Clock::duration timeout, const Tuning& tuning);

  std::string name() const override { return "mpi"; }
  std::unique_ptr<Arena> allocate(std::size_t bytes) override;
  void poll() override;
  void shutdown() override;

 protected:
  void start(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  /// Runs `action` unless the group is broken; breaks it when `action` throws.
  template <class Action>
  auto guarded(Action&& action);

  Session session_;
  Engine engine_;
  std::exception_ptr failure_;  // what broke the group
};

}  // namespace lockstep::comm
