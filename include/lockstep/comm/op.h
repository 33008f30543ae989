// The description of an operation of a group: ranks send, compare and show it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "lockstep/base/dtype.h"

namespace lockstep::comm {

class Arena;
class ReductionTree;

enum class ReduceOp : std::uint8_t { kSum, kMin, kMax, kProd };
/// How often an allreduce over hosts with several ranks each rounds sums and products of bf16 and f16: once at the end,
/// with each host's result sent in f32; or each host's result too, with half of the bytes in the first exchange.
enum class Rounding : std::uint8_t { kOnce, kPerHost };
enum class OpKind : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier, kReduce };

constexpr const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kProd: return "prod";
  }
  return "?";
}

constexpr const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "allreduce";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllGather: return "allgather";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kReduce: return "reduce";
  }
  return "?";
}

/// Whether it adds numbers up, or else moves them only.
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}
/// Whether it has a root.
constexpr bool has_root(OpKind kind) { return kind == OpKind::kBroadcast || kind == OpKind::kReduce; }

/// Note [Signatures]
/// All of an operation but the address of its data, as plain bytes. Slots in shared memory, headers and notices of
/// messages and the comparisons over NCCL hold it as it is, MPI's tags some bits of it (Note [Tags]), and whatever is
/// said of an operation is made of it by describe(). What ranks compare is `history`, the digest() of it and of all
/// before it: so whatever two ranks mean differently (kind, type, reduction, size, offset, arena, root, training step,
/// bucket) makes all their later histories differ, and an error shows both descriptors. It names no group: each group
/// has memory, connections and communicators of its own, on which nothing of another one arrives.
struct OpDescriptor {
  std::uint64_t op_index = 0;  // counts what a backend was given from 1, the group's own exchanges included
  std::uint64_t history = 0;   // digest() of this operation and all before it, where a backend compares them
  // What it is:
  std::uint64_t sequence = 0;  // counts a group's operations from 1; 0: of the group itself, for an allocation
  std::uint64_t count = 0;     // elements
  std::uint64_t offset_bytes = 0;
  std::uint64_t arena_bytes = 0;     // the arena's size
  std::uint64_t partial_stride = 0;  // bytes between a rank's partial sums, where there is a tree
  std::int64_t step = -1;            // the training step; -1 is none
  std::uint32_t arena_id = 0;        // the group's arenas are counted from 1; 0 is none
  std::int32_t root = 0;             // of a broadcast or a reduce
  std::int32_t bucket = -1;          // of gradients; -1 is none
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  DType dtype = DType::kF32;
  std::uint8_t tree = 0;  // the group's number of the tree that it sums along; 0, kRoundedPerHost: in rank order

  static constexpr std::uint8_t kRoundedPerHost = 255;
  Rounding rounding() const { return tree == kRoundedPerHost ? Rounding::kPerHost : Rounding::kOnce; }

  std::size_t bytes() const { return count * size_of(dtype); }

  friend bool operator==(const OpDescriptor&, const OpDescriptor&) = default;
};
static_assert(std::has_unique_object_representations_v<OpDescriptor>, "every byte of it has a meaning");
static_assert(std::is_trivially_copyable_v<OpDescriptor>);

/// A number that differs, but for rare accidents, when what this operation is or the `history` before it does. Each
/// word is mixed in by a function that is one to one in it and in what came before: Fibonacci hashing (Knuth, The Art
/// of Computer Programming, volume 3, section 6.4), and a shift that brings the upper half down.
constexpr std::uint64_t digest(const OpDescriptor& op, std::uint64_t history) {
  constexpr std::size_t kFirst = offsetof(OpDescriptor, sequence) / sizeof(std::uint64_t);
  const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(OpDescriptor) / sizeof(std::uint64_t)>>(op);
  for (std::size_t i = kFirst; i < words.size(); ++i) {
    history = (history ^ words[i]) * 0x9e3779b97f4a7c15ULL;
    history ^= history >> 32;
  }
  return history;
}

/// Whether both are the same operation, whatever came before.
constexpr bool is_same_operation(const OpDescriptor& a, const OpDescriptor& b) { return digest(a, 0) == digest(b, 0); }

/// "allreduce #7 (sum of 4096 f32 at byte 0, step 3, bucket 0)", for messages and records; "an allocation" for what a
/// group does by itself.
std::string describe(const OpDescriptor& op);

/// The error if rank `who` is in `theirs` and this rank in `ours`, as their histories show: "out of step: rank 1 (host
/// b) is in allreduce #7 (…), this rank is in barrier #7".
std::string out_of_step_text(const std::string& who, const OpDescriptor& theirs, const OpDescriptor& ours);

/// The remedy for ranks that are out of step.
inline constexpr const char* kSameProgram = "start every rank with the same binary, options and data";

/// An operation as a backend is given it: what it is, and where its bytes are on this rank. All but `arena` that it
/// points to stays until the operation is complete.
struct Op : OpDescriptor {
  const Arena* arena = nullptr;  // that was named; it may be gone
  std::byte* data = nullptr;     // the region's
  std::size_t stride_bytes = 0;  // between the copies of ranks that share memory (Arena::stride_bytes())
  bool within_host = false;      // of the ranks of each host alone: an exchange of texts
  /// Note [Reduction tree]: this rank's partial sums lie at multiples of partial_stride from `data`. nullptr: none.
  const ReductionTree* along = nullptr;
  std::uint64_t flight = 0;  // its number in this process's flight record; 0: it has none
  /// Of a DeviceGroup, where `data` is the caller's (Note [Memory of the caller's]): this rank's part of an allgather
  /// or a reduce_scatter, count / ranks elements, apart from it. nullptr: the slice_of() the region.
  std::byte* part = nullptr;

  /// Note [Direct results]
  /// Where every rank sees the copies of all ranks, what belongs to the caller need not lie in the arena to be read by
  /// others, only to be theirs to read: each rank takes the result straight from the copies into its own memory, and
  /// the arena's stay as they are. An allreduce reads every copy on every rank, for one copy less and one write less.
  struct Into {
    std::byte* data = nullptr;     // nullptr: the region itself. Of an allreduce: has this rank's contribution, too
    std::size_t bytes = 0;         // of an allgather: of each rank's part, from the beginning of its slice
    std::size_t stride_bytes = 0;  // of an allgather: between these
  } into = {};
};

/// A rank's part of a region in reduce_scatter and allgather.
struct Slice {
  std::size_t begin = 0;  // elements
  std::size_t count = 0;
};

/// Rank `rank`'s slice of `count` elements of `element_bytes` bytes: contiguous, in rank order, covering all, with
/// boundaries at multiples of 64 bytes (so that two ranks never write one cache line). Trailing slices of small
/// regions may be empty.
constexpr Slice slice_of(std::size_t count, std::size_t element_bytes, int rank, int world_size) {
  const std::size_t unit = 64 / element_bytes;
  const std::size_t units = (count + unit - 1) / unit;
  const auto r = static_cast<std::size_t>(rank);
  const auto n = static_cast<std::size_t>(world_size);
  const std::size_t per = units / n, extra = units % n;
  const auto first_unit = [&](std::size_t k) { return per * k + (k < extra ? k : extra); };
  const std::size_t begin = first_unit(r) * unit < count ? first_unit(r) * unit : count;
  const std::size_t end = first_unit(r + 1) * unit < count ? first_unit(r + 1) * unit : count;
  return {begin, end - begin};
}

}  // namespace lockstep::comm
