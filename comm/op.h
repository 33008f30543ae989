// One collective as a process group hands it to its backend.
#pragma once

#include <cstdint>
#include <string>

#include "comm/arena.h"
#include "comm/types.h"

namespace lockstep::comm {

struct Op {
  std::uint64_t sequence = 0;  // counts a group's operations from 1
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  int root = 0;    // of a broadcast
  Region region;   // empty for a barrier
  std::int64_t step = -1;  // the training step it belongs to; -1 is none
};

/// "allreduce #7 (sum of 4096 f32 at byte 0, step 3)", for messages and records.
std::string describe(const Op& op);

}  // namespace lockstep::comm
