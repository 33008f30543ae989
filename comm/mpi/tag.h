// What a message says of itself: MPI's tag.
#pragma once

#include <bit>
#include <cstdint>

#include "comm/op.h"

namespace lockstep::comm {

/// Note [Tags]
/// A tag carries the low bits of the operation's sequence number, its kind, phase, element type and reduction, and a
/// hash of count, offset and root. A receive names its tag, so bytes of another operation, or of the same one with
/// another size, never land in it: they stay with MPI, where probing for any tag finds them and tells what the sender
/// is at. Messages of one tag between two ranks arrive in the order sent, so chunks need no number.
struct TagFields {
  std::uint32_t sequence = 0;  // modulo 2^sequence_bits
  OpKind kind = OpKind::kBarrier;
  std::uint32_t phase = 0;  // 0 or 1
  DType dtype = DType::kF32;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint32_t hash = 0;
  friend bool operator==(const TagFields&, const TagFields&) = default;
};

class TagLayout {
 public:
  /// `upper_bound` is MPI_TAG_UB; the standard grants 32767, libraries up to 2^31 - 1.
  explicit constexpr TagLayout(int upper_bound)
      : bits_(static_cast<int>(std::bit_width(static_cast<std::uint32_t>(upper_bound) + 1u)) - 1),
        sequence_bits_(bits_ - kFixedBits < kMostSequenceBits ? bits_ - kFixedBits : kMostSequenceBits),
        hash_bits_(bits_ - kFixedBits - sequence_bits_) {}

  constexpr TagFields fields_of(const Op& op, std::uint32_t phase) const {
    // FNV-1a over what all ranks must agree on; a barrier has none of it.
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const std::uint64_t value : {static_cast<std::uint64_t>(op.region.count),
                                      static_cast<std::uint64_t>(op.region.offset_bytes),
                                      static_cast<std::uint64_t>(op.root)})
      for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((value >> (8 * byte)) & 0xffu)) * 0x100000001b3ULL;
    return {low_bits(op.sequence, sequence_bits_), op.kind,   phase,
            op.region.dtype,                       op.reduce, low_bits(hash ^ (hash >> 32), hash_bits_)};
  }

  constexpr int encode(const TagFields& f) const {
    std::uint32_t tag = f.hash;
    tag = tag << sequence_bits_ | f.sequence;
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
    f.sequence = take(sequence_bits_);
    f.hash = take(hash_bits_);
    return f;
  }

  constexpr int sequence_bits() const { return sequence_bits_; }

 private:
  static constexpr int kFixedBits = 3 + 1 + 3 + 2;
  static constexpr int kMostSequenceBits = 12;

  static constexpr std::uint32_t low_bits(std::uint64_t value, int bits) {
    return static_cast<std::uint32_t>(value & ((std::uint64_t{1} << bits) - 1));
  }

  int bits_;
  int sequence_bits_;
  int hash_bits_;
};

}  // namespace lockstep::comm
