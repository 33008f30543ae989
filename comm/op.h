// One collective as a process group hands it to its backend.
#pragma once

#include <cstdint>
#include <string>

#include "comm/arena.h"
#include "comm/op_signature.h"
#include "comm/types.h"

namespace lockstep::comm {

struct Op {
  std::uint64_t sequence = 0;  // counts a group's operations from 1; 0: of the group itself, for an allocation
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  int root = 0;                   // of a broadcast
  Region region;                  // empty for a barrier
  std::byte* data = nullptr;      // the region's; the arena itself may be gone
  std::uint32_t arena_id = 0;     // Arena::id(); 0 is none
  std::uint64_t arena_bytes = 0;  // its size
  std::int64_t step = -1;         // the training step it belongs to; -1 is none
  std::int32_t bucket = -1;       // of gradients; -1 is none
  std::uint64_t place = 0;        // counts what a backend was given from 1, the group's own exchanges included
  std::uint64_t history = 0;      // digest() of this operation and all before it, where a backend compares them
};

constexpr OpSignature signature_of(const Op& op) {
  return {.sequence = op.sequence,
          .count = op.region.count,
          .offset_bytes = op.region.offset_bytes,
          .arena_bytes = op.arena_bytes,
          .step = op.step,
          .arena_id = op.arena_id,
          .root = op.root,
          .bucket = op.bucket,
          .kind = op.kind,
          .reduce = op.reduce,
          .dtype = op.region.dtype};
}

inline std::string describe(const Op& op) { return describe(signature_of(op)); }

}  // namespace lockstep::comm
