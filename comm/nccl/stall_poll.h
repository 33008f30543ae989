// Finds the missing ranks while NCCL only reports that nothing moves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/store.h"
#include "comm/wait.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Note [Stall poll]
/// NCCL does not know who is missing, and the control group's collectives are no way to ask: whoever is merely late
/// would find one that it never issued. But the store through which the ranks have joined is still there, and a look at
/// it obliges nobody. A rank that has waited for stall_warning() in an operation reports that under a key of its own.
/// Other waiting ranks look for such keys every second, and then report their waiting too. Whoever has said nothing
/// after a few seconds is named (Note [Stall notices]), by the lowest rank that has. In a stall that nobody speaks of,
/// nothing is set.
class StallPoll {
 public:
  /// `store` outlives it; nullptr: there is none, and nothing is ever said. `number` identifies the group within the
  /// job, and is the same on all ranks.
  StallPoll(Store* store, int rank, int size, std::uint32_t number);

  /// To be called at every look of a wait whose first operation is `op`.
  void look(const Op& op, Clock::time_point now);

 private:
  void ask(const Op& op, bool due, Clock::time_point now);

  Store* store_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::uint32_t number_;
  StallNotice notice_;
  std::uint64_t sequence_ = 0;
  std::vector<std::string> keys_;  // of `sequence_`, by rank
  bool said_ = false;              // this rank's is set
  Clock::time_point next_poll_{};
  std::optional<Clock::time_point> report_at_;
};

}  // namespace lockstep::comm
