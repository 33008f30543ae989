// Small types that every collective names.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace lockstep::comm {

enum class ReduceOp : std::uint8_t { kSum, kMin, kMax };
enum class OpKind : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

constexpr const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
  }
  return "?";
}

/// Whether it adds numbers up, or else moves them only.
constexpr bool reduces(OpKind kind) { return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter; }

constexpr const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "allreduce";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllGather: return "allgather";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kBarrier: return "barrier";
  }
  return "?";
}

}  // namespace lockstep::comm
