// Finds the missing ranks while NCCL only reports that nothing moves.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/stall.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/op.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

class Store;

/// Note [Stall poll]
/// NCCL does not know who is missing, and the control group's collectives are no way to ask: whoever is merely late
/// would find one that it never issued. But the store through which the ranks have joined is still there, and a look at
/// it obliges nobody. A rank that has waited for stall_warning() in an operation reports that under a key of its own.
/// Other waiting ranks look for such keys every second, and then report their waiting too. Whoever has said nothing
/// after a few seconds is named (Note [Stall notices]), by the lowest rank that has. In a stall that nobody speaks of,
/// nothing is set.
class StallPoll final : private StallReports {
 public:
  /// Over the store of `control`, which outlives it; where that has none, nothing is ever said. `number` identifies the
  /// group within the job, and is the same on all ranks.
  StallPoll(ProcessGroup& control, std::uint32_t number);

  /// To be called at every look of a wait whose first operation is `op`.
  void look(const Op& op, Clock::time_point now);

 private:
  void find_states(const Op& op, std::span<PeerState> states) override;
  std::string suspect_text(int rank) const override {
    return fmt::format("rank {}, which does not {}", job_rank(rank), answered() ? "wait in it" : "answer");
  }
  int job_rank(int rank) const override { return control_.job_rank(rank); }
  std::string other_cause() const override { return "a GPU or the network between them: every rank waits in it"; }
  bool speaks(const Op& op, unsigned times) override;

  std::string key_of(int rank) const;
  void say();
  void ask();
  /// Without an answer to its own key nothing is known of the others either.
  bool answered() const { return said_[static_cast<std::size_t>(control_.rank())].has_value(); }

  ProcessGroup& control_;
  Store* store_;
  const std::uint32_t number_;
  StallDiagnosis diagnosis_;
  std::uint64_t sequence_ = 0;
  bool has_said_ = false;                         // this rank's key of `sequence_` is set
  std::vector<std::optional<std::string>> said_;  // by rank, when it was asked last
  Clock::time_point next_poll_{};
};

}  // namespace lockstep::comm
