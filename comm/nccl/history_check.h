// Whether all ranks have issued the same operations.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/process_group.h"

namespace lockstep::comm {

/// Note [Histories]
/// NCCL sums whatever comes: a rank that has left out a step adds its gradients to those of other steps from then on.
/// So the ranks compare digests of all that they have issued, through the CPU's group: every hundred operations, which
/// all of them come to at the same number of operations whatever they have left out, and when somebody asks.
class HistoryCheck {
 public:
  /// Collective. `control` must outlive it.
  explicit HistoryCheck(ProcessGroup& control);

  /// Collective, blocking: throws OutOfStepError on every rank unless all have the same history, of which `last` is the
  /// end. One operation of 128 bytes a rank.
  void compare(const OpDescriptor& last);

 private:
  [[noreturn]] void fail() const;

  struct alignas(kArenaAlignment) Line {  // a rank's slice
    OpDescriptor last;
  };
  std::span<const Line> lines() const;

  ProcessGroup& control_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace lockstep::comm
