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
  int root = 0;               // of a broadcast
  Region region;              // empty for a barrier
  std::byte* data = nullptr;  // the region's; the arena itself may be gone where an exception has cut a step short
  std::int64_t step = -1;     // the training step it belongs to; -1 is none
  std::uint64_t history = 0;  // digest() of this operation and all before it, where a backend compares them
};

/// A number that differs, but for rare accidents, when this operation or the `history` before it does: FNV-1a over
/// everything that the ranks must agree on.
constexpr std::uint64_t digest(const Op& op, std::uint64_t history) {
  for (const std::uint64_t value :
       {static_cast<std::uint64_t>(op.kind), static_cast<std::uint64_t>(op.reduce),
        static_cast<std::uint64_t>(op.region.dtype), static_cast<std::uint64_t>(op.region.count),
        static_cast<std::uint64_t>(op.region.offset_bytes), static_cast<std::uint64_t>(op.root)})
    for (int byte = 0; byte < 8; ++byte) history = (history ^ ((value >> (8 * byte)) & 0xffu)) * 0x100000001b3ULL;
  return history;
}

/// Whether two ranks mean the same by these operations, whatever they have done before.
bool same_operation(const Op& a, const Op& b);

/// "allreduce #7 (sum of 4096 f32 at byte 0, step 3)", for messages and records.
std::string describe(const Op& op);

}  // namespace lockstep::comm
