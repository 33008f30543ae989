// What the ranks of a group must agree on about each of their operations.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/dtype.h"
#include "comm/types.h"

namespace lockstep::comm {

/// Note [Signatures]
/// All of an operation but the address of its data, as plain bytes: backends send it as it is, and compare digest()s of
/// it and of all before it. So whatever two ranks mean differently (kind, type, reduction, size, place, arena, root,
/// training step, bucket) makes all their later digests differ, and an error shows both signatures.
struct OpSignature {
  std::uint64_t sequence = 0;  // counts a group's operations from 1; 0: of the group itself, for an allocation
  std::uint64_t count = 0;     // elements
  std::uint64_t offset_bytes = 0;
  std::uint64_t arena_bytes = 0;  // the arena's size
  std::int64_t step = -1;         // the training step; -1 is none
  std::uint32_t arena_id = 0;     // the group's arenas are counted from 1; 0 is none
  std::int32_t root = 0;          // of a broadcast
  std::int32_t bucket = -1;       // of gradients; -1 is none
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  DType dtype = DType::kF32;
  std::uint8_t reserved = 0;

  friend bool operator==(const OpSignature&, const OpSignature&) = default;
};
static_assert(std::has_unique_object_representations_v<OpSignature>, "every byte of it has a meaning");

/// A number that differs, but for rare accidents, when this operation or the `history` before it does. Each word is
/// mixed in by a function that is one to one in it and in what came before.
constexpr std::uint64_t digest(const OpSignature& op, std::uint64_t history) {
  using Words = std::array<std::uint64_t, sizeof(OpSignature) / sizeof(std::uint64_t)>;
  for (const std::uint64_t word : std::bit_cast<Words>(op)) {
    history = (history ^ word) * 0x9e3779b97f4a7c15ULL;
    history ^= history >> 32;
  }
  return history;
}

/// "allreduce #7 (sum of 4096 f32 at byte 0, step 3, bucket 0)", for messages and records; "an allocation" for what a
/// group does by itself.
std::string describe(const OpSignature& op);

/// What is wrong where rank `who` is in `theirs`, and this rank in `ours`, as their digests have shown: "out of step:
/// rank 1 (host b) is in allreduce #7 (…), this rank is in barrier #7".
std::string out_of_step_text(const std::string& who, const OpSignature& theirs, const OpSignature& ours);

}  // namespace lockstep::comm
