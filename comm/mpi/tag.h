// What a message says of itself: MPI's tag.
#pragma once

#include <bit>
#include <cstdint>

#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Note [Tags]
/// A tag carries the low bits of the operation's index in the group's order, its kind, phase, element type and
/// reduction, and some bits of its history: what it, and all operations before it, were (Note [Signatures]). A receive
/// names its tag, so bytes of another operation, or of the same one with another size or root, never land in it: they
/// stay with MPI, where probing for any tag finds them and shows the sender's operation. And ranks that disagreed
/// without noticing, as two roots of one broadcast would, cannot continue together. Messages of one tag between two
/// ranks arrive in the order sent, so chunks need no number.
struct TagFields {
  std::uint32_t op_index = 0;  // modulo 2^index_bits
  OpKind kind = OpKind::kBarrier;
  std::uint32_t phase = 0;  // 0 or 1
  DType dtype = DType::kF32;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint32_t history = 0;
  friend bool operator==(const TagFields&, const TagFields&) = default;
};

class TagLayout {
 public:
  /// `upper_bound` is MPI_TAG_UB; the standard grants 32767, libraries up to 2^31 - 1.
  explicit constexpr TagLayout(int upper_bound)
      : bits_(static_cast<int>(std::bit_width(static_cast<std::uint32_t>(upper_bound) + 1u)) - 1),
        index_bits_(bits_ - kFixedBits < kMostIndexBits ? bits_ - kFixedBits : kMostIndexBits),
        history_bits_(bits_ - kFixedBits - index_bits_) {}

  constexpr TagFields fields_of(const OpDescriptor& op, std::uint32_t phase) const {
    return {low_bits(op.op_index, index_bits_),
            op.kind,
            phase,
            op.dtype,
            op.reduce,
            low_bits(op.history ^ (op.history >> 32), history_bits_)};
  }

  constexpr int encode(const TagFields& f) const {
    std::uint32_t tag = f.history;
    tag = tag << index_bits_ | f.op_index;
    tag = tag << 3 | static_cast<std::uint32_t>(f.kind);
    tag = tag << 1 | f.phase;
    tag = tag << 3 | static_cast<std::uint32_t>(f.dtype);
    tag = tag << 2 | static_cast<std::uint32_t>(f.reduce);
    return static_cast<int>(tag);
  }

  constexpr TagFields decode(int tag) const {
    auto rest = static_cast<std::uint32_t>(tag);
    const auto take = [&rest](int bits) {
      const std::uint32_t value = low_bits(rest, bits);
      rest >>= bits;
      return value;
    };
    TagFields f;
    f.reduce = static_cast<ReduceOp>(take(2));
    f.dtype = static_cast<DType>(take(3));
    f.phase = take(1);
    f.kind = static_cast<OpKind>(take(3));
    f.op_index = take(index_bits_);
    f.history = take(history_bits_);
    return f;
  }

  /// How many operations `earlier` lies before `later`, modulo 2^index_bits; from farthest() on, it lies after it.
  constexpr std::uint32_t distance(const TagFields& earlier, const TagFields& later) const {
    return low_bits(std::uint64_t{later.op_index} - earlier.op_index, index_bits_);
  }
  constexpr std::uint32_t farthest() const { return std::uint32_t{1} << (index_bits_ - 1); }

  constexpr int index_bits() const { return index_bits_; }

 private:
  static constexpr int kFixedBits = 3 + 1 + 3 + 2;
  static constexpr int kMostIndexBits = 12;

  static constexpr std::uint32_t low_bits(std::uint64_t value, int bits) {
    return static_cast<std::uint32_t>(value & ((std::uint64_t{1} << bits) - 1));
  }

  int bits_;
  int index_bits_;
  int history_bits_;
};

}  // namespace lockstep::comm
