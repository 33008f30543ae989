// MPI without a thread of its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mpi/engine.h"
#include "comm/mpi/mpi_store.h"
#include "comm/process_group.h"
#include "comm/text_exchange.h"

namespace lockstep::comm {

/// The calling thread owns MPI. Operations move on whenever it issues, polls, asks or waits; what has been issued
/// earlier than it is needed absorbs the difference between fast and slow ranks all the same.
class InlineGroup final : public ProcessGroup {
 public:
  /// Takes `store`, which owns MPI; shutdown() ends it.
  InlineGroup(std::unique_ptr<MpiStore> store, Clock::duration timeout, const Tuning& tuning);
  ~InlineGroup() override;

  std::string name() const override { return "mpi"; }
  void poll() override;
  Store* store() override { return store_.get(); }
  void shutdown() override;

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override;
  bool has_let_go(std::uint64_t sequence) const noexcept override { return engine_.completed_sequence() >= sequence; }
  void start(const Op& op) override;
  bool is_done(std::uint64_t sequence) override;
  void wait_done(std::uint64_t sequence, Deadline deadline) override;

 private:
  template <class Condition>
  void wait_until(Condition&& done, Deadline deadline);

  std::unique_ptr<MpiStore> store_;
  Engine engine_;
  TextExchange texts_;
};

}  // namespace lockstep::comm
