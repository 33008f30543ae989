#include "comm/mpi/tag.h"

#include <gtest/gtest.h>

#include <climits>

#include "tests/comm/reference.h"

namespace lockstep::comm {
namespace {

constexpr OpKind kAllKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                                OpKind::kBroadcast, OpKind::kBarrier,       OpKind::kReduce};

TEST(Tag, RoundTripsWithAnyUpperBound) {
  for (const int bound : {32767, 65535, 8388607, 268435455, INT_MAX}) {
    const TagLayout tags(bound);
    for (const OpKind kind : kAllKinds)
      for (const DType dtype : reference::kDTypes)
        for (const ReduceOp reduce : reference::kReduceOps)
          for (std::uint32_t phase = 0; phase < 2; ++phase)
            for (const std::uint64_t sequence : {1ull, 31ull, 63ull, 4095ull, 4096ull, 1234567890123ull}) {
              Op op;
              op.op_index = op.sequence = sequence;
              op.kind = kind;
              op.reduce = reduce;
              op.dtype = dtype;
              op.count = sequence * 77;
              op.history = digest(op, 5);
              const TagFields fields = tags.fields_of(op, phase);
              const int tag = tags.encode(fields);
              ASSERT_GE(tag, 0);
              ASSERT_LE(tag, bound);
              ASSERT_EQ(tags.decode(tag), fields);
            }
  }
}

// All fields of an operation are compared, but not its place in the group's order.
TEST(Descriptor, EachFieldIsInTheDigest) {
  const auto changed = [](auto change) {
    OpDescriptor op, other;
    change(other);
    return !is_same_operation(op, other) && digest(op, 7) != digest(other, 7);
  };
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.sequence = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.count = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.offset_bytes = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.arena_bytes = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.step = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.arena_id = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.root = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.bucket = 8; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.kind = OpKind::kAllGather; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.reduce = ReduceOp::kMin; }));
  EXPECT_TRUE(changed([](OpDescriptor& o) { o.dtype = DType::kI64; }));
  EXPECT_FALSE(changed([](OpDescriptor& o) { o.op_index = 8; }));
  EXPECT_FALSE(changed([](OpDescriptor& o) { o.history = 8; }));
  EXPECT_NE(digest({}, 7), digest({}, 8));
}

TEST(Tag, DistinguishesOperations) {
  const TagLayout tags(INT_MAX);
  Op op;
  op.op_index = op.sequence = 7;
  op.kind = OpKind::kAllReduce;
  op.count = 1000;
  const auto tag_of = [&](Op which, std::uint32_t phase, std::uint64_t before) {
    which.history = digest(which, before);
    return tags.encode(tags.fields_of(which, phase));
  };
  const int tag = tag_of(op, 0, 1);
  const auto differs = [&](auto change, std::uint32_t phase = 0) {
    Op other = op;
    change(other);
    return tag_of(other, phase, 1) != tag;
  };
  EXPECT_TRUE(differs([](Op& o) { o.op_index = 8; }));
  EXPECT_TRUE(differs([](Op& o) { o.kind = OpKind::kReduceScatter; }));
  EXPECT_TRUE(differs([](Op& o) { o.reduce = ReduceOp::kMax; }));
  EXPECT_TRUE(differs([](Op& o) { o.dtype = DType::kI32; }));
  EXPECT_TRUE(differs([](Op& o) { o.count = 1001; }));
  EXPECT_TRUE(differs([](Op& o) { o.offset_bytes = 64; }));
  EXPECT_TRUE(differs([](Op& o) { o.root = 1; }));
  EXPECT_TRUE(differs([](Op& o) { o.arena_id = 2; }));
  EXPECT_TRUE(differs([](Op& o) { o.arena_bytes = 8192; }));
  EXPECT_TRUE(differs([](Op& o) { o.step = 12; }));
  EXPECT_TRUE(differs([](Op& o) { o.bucket = 1; }));
  EXPECT_TRUE(differs([](Op&) {}, 1));
  EXPECT_NE(tag_of(op, 0, 2), tag);
}

TEST(Tag, DistanceWrapsAround) {
  const TagLayout tags(INT_MAX);
  const auto at = [&](std::uint64_t index) { return tags.fields_of({.op_index = index}, 0); };
  EXPECT_EQ(tags.distance(at(5), at(7)), 2u);
  EXPECT_EQ(tags.distance(at(4095), at(4097)), 2u);
  EXPECT_EQ(tags.distance(at(9), at(9)), 0u);
  EXPECT_GE(tags.distance(at(4097), at(4095)), tags.farthest());
}

// The operations that may be under way at once must differ even with the fewest bits that MPI grants.
TEST(Tag, OpIndicesAreDistinctWithinAWindow) { EXPECT_GE(TagLayout(32767).index_bits(), 6); }

}  // namespace
}  // namespace lockstep::comm
