// The MPI backend's algorithms with tiny chunks and windows, so that little data reaches every edge.
#include "comm/mpi/engine.h"

#include <gtest/gtest.h>

#include "comm/mpi/session.h"
#include "lockstep/comm/arena.h"
#include "tests/comm/reference.h"
#include "tests/support/allocations.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using reference::Bytes;

/// One session for all tests; each test has engines of its own on it.
class EngineTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { session_ = std::make_unique<Session>(testing::world(), Deadline::after_seconds(60)); }
  static void TearDownTestSuite() { session_->finalize(); }

  static void finish(MpiEngine& engine) {
    const auto deadline = Deadline::after_seconds(60);
    while (!engine.idle()) {
      if (engine.advance()) continue;
      engine.watch_stall();
      if (deadline.expired()) engine.time_out(60);
    }
  }

  static int rank() { return session_->rank(); }
  static int size() { return session_->size(); }

  static std::unique_ptr<Session> session_;
};
std::unique_ptr<Session> EngineTest::session_;

Op op_on(const Region& region, OpKind kind, std::uint64_t sequence, int root = 0) {
  Op op;
  op.sequence = sequence;
  op.kind = kind;
  op.root = root;
  op.count = region.count;
  op.offset_bytes = region.offset_bytes;
  op.dtype = region.dtype;
  if (region.arena != nullptr) op.data = region.data();
  return op;
}

std::vector<Tuning> tunings() {
  std::vector<Tuning> all;
  for (const std::size_t chunk : {64ul, 128ul, 960ul})
    for (const std::uint32_t chunks_under_way : {1u, 3u})
      for (const std::size_t operations : {1ul, 4ul}) {
        Tuning tuning;
        tuning.chunk_bytes = chunk;
        tuning.chunks_under_way = chunks_under_way;
        tuning.operations_under_way = operations;
        tuning.small_bytes = 0;
        all.push_back(tuning);
      }
  all.emplace_back();                    // the defaults
  all.emplace_back().scratch_bytes = 0;  // the smallest chunks that there are
  return all;
}

TEST_F(EngineTest, SameBitsWithEveryTuning) {
  constexpr std::size_t kMostBytes = 12'000;
  const auto arena = HostArena::map(kMostBytes);
  for (const Tuning& tuning : tunings()) {
    MpiEngine engine(*session_, tuning, std::chrono::seconds(5));
    std::uint64_t sequence = 0;
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kU8})
      for (const std::size_t count : {0ul, 1ul, 16ul, 17ul, 64ul, 65ul, 127ul, 129ul, 500ul, 1000ul, 2999ul}) {
        const Op op = op_on({arena.get(), 0, count, dtype}, OpKind::kAllReduce, ++sequence);
        const auto parts = reference::contributions(dtype, count, sequence, size());
        if (count > 0) std::memcpy(op.data, parts[static_cast<std::size_t>(rank())].data(), op.bytes());
        engine.submit(op);
        finish(engine);
        const Bytes expected = reference::reduce(dtype, ReduceOp::kSum, parts);
        ASSERT_EQ(Bytes(op.data, op.data + op.bytes()), expected)
            << describe(op) << " with chunks of " << tuning.chunk_bytes;
      }
  }
}

TEST_F(EngineTest, EveryKindInTinyChunks) {
  constexpr std::size_t kMostBytes = 4096;
  const auto arena = HostArena::map(kMostBytes);
  for (const Tuning& tuning : tunings()) {
    MpiEngine engine(*session_, tuning, std::chrono::seconds(5));
    std::uint64_t sequence = 0;
    for (const std::size_t count : {0ul, 1ul, 16ul, 31ul, 100ul, 1000ul}) {
      const std::size_t bytes = count * 4;
      const Region region{arena.get(), 0, count, DType::kF32};
      const auto run = [&](OpKind kind, int root) {
        const auto parts = reference::contributions(DType::kF32, count, sequence, size());
        if (bytes > 0) std::memcpy(region.data(), parts[static_cast<std::size_t>(rank())].data(), bytes);
        engine.submit(op_on(region, kind, ++sequence, root));
        finish(engine);
        return parts;
      };
      for (int root = 0; root < size(); ++root) {
        const auto parts = run(OpKind::kBroadcast, root);
        ASSERT_EQ(Bytes(region.data(), region.data() + bytes), parts[static_cast<std::size_t>(root)]);
      }
      auto parts = run(OpKind::kAllGather, 0);
      for (int r = 0; r < size(); ++r) {
        const Slice slice = slice_of(count, 4, r, size());
        if (slice.count == 0) continue;
        ASSERT_EQ(std::memcmp(region.data() + slice.begin * 4,
                              parts[static_cast<std::size_t>(r)].data() + slice.begin * 4, slice.count * 4),
                  0);
      }
      parts = run(OpKind::kReduceScatter, 0);
      const Bytes sum = reference::reduce(DType::kF32, ReduceOp::kSum, parts);
      if (const Slice mine = slice_of(count, 4, rank(), size()); mine.count > 0) {
        ASSERT_EQ(std::memcmp(region.data() + mine.begin * 4, sum.data() + mine.begin * 4, mine.count * 4), 0);
      }
      for (int root = 0; root < size(); ++root) {
        const Bytes reduced = reference::reduce(DType::kF32, ReduceOp::kSum, run(OpKind::kReduce, root));
        if (rank() == root) {
          ASSERT_EQ(Bytes(region.data(), region.data() + bytes), reduced);
        }
      }
      engine.submit(op_on({}, OpKind::kBarrier, ++sequence));
      finish(engine);
    }
  }
}

// Operations that wait for a slot must begin in order, whatever completes when.
TEST_F(EngineTest, ALongQueueDrainsInOrder) {
  const auto arena = HostArena::map(1000 * kArenaAlignment);
  Tuning tuning;
  tuning.operations_under_way = 2;
  MpiEngine engine(*session_, tuning, std::chrono::seconds(5));
  for (std::uint64_t i = 1; i <= 1000; ++i) {
    const Region region{arena.get(), (i - 1) * kArenaAlignment, 1, DType::kI64};
    arena->view<std::int64_t>(region.offset_bytes, 1)[0] = static_cast<std::int64_t>(i);
    engine.submit(op_on(region, OpKind::kAllReduce, i));
    if (i % 100 == 0) engine.advance();
  }
  finish(engine);
  for (std::uint64_t i = 1; i <= 1000; ++i)
    ASSERT_EQ(arena->view<std::int64_t>((i - 1) * kArenaAlignment, 1)[0], static_cast<std::int64_t>(i) * size());
}

TEST_F(EngineTest, TheSteadyStateAllocatesNothing) {
  constexpr std::size_t kCount = 100'000;
  const auto arena = HostArena::map(4 * kCount * sizeof(float));
  Tuning tuning;
  tuning.chunk_bytes = 16 << 10;
  MpiEngine engine(*session_, tuning, std::chrono::seconds(5));
  std::uint64_t sequence = 0;
  const auto step = [&] {
    for (std::size_t i = 0; i < 4; ++i) {
      const Region region{arena.get(), i * kCount * sizeof(float), i == 0 ? 1 : kCount, DType::kF32};
      engine.submit(op_on(region, OpKind::kAllReduce, ++sequence));
      engine.submit(op_on(region, OpKind::kBroadcast, ++sequence));
    }
    finish(engine);
  };
  // Every slot gets its scratch once.
  for (int i = 0; i < 5; ++i) step();
  const std::size_t before = testing::thread_allocations();
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(testing::thread_allocations() - before, 0u);  // what goes through C++; MPI's own do not
}

}  // namespace
}  // namespace lockstep::comm
