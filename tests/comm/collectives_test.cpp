// Every collective against a plain loop, on the group that make_group gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "base/error.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/reference.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using reference::Bytes;
using testing::group;

/// What rank `group().rank()`'s region must hold after the operation; nothing where it is unspecified.
struct Expected {
  std::size_t begin = 0;
  Bytes bytes;
};

/// Which ranks are on one host, in the order of their first ranks; all on one where that makes no difference.
const std::vector<std::vector<int>>& hosts() {
  static const std::vector<std::vector<int>> all = [] {
    std::vector<std::string> names;
    std::vector<std::vector<int>> found;
    const auto host_of_rank = group().all_gather_text(group().name() == "hosts" ? host_name() : "");
    for (int rank = 0; rank < group().size(); ++rank) {
      const std::string& name = host_of_rank[static_cast<std::size_t>(rank)];
      const auto at = std::find(names.begin(), names.end(), name) - names.begin();
      if (at == static_cast<std::ptrdiff_t>(names.size())) {
        names.push_back(name);
        found.emplace_back();
      }
      found[static_cast<std::size_t>(at)].push_back(rank);
    }
    return found;
  }();
  return all;
}

Expected expected_of(OpKind kind, DType dtype, ReduceOp op, std::size_t count, int root, std::uint64_t seed) {
  const auto parts = reference::contributions(dtype, count, seed, group().size());
  const std::size_t element = size_of(dtype);
  const auto slice_bytes = [&](const Bytes& bytes, int rank) {
    const Slice slice = slice_of(count, element, rank, group().size());
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(slice.begin * element);
    return Expected{slice.begin * element, Bytes(begin, begin + static_cast<std::ptrdiff_t>(slice.count * element))};
  };
  switch (kind) {
    case OpKind::kReduce:
      if (group().rank() != root) return {};
      [[fallthrough]];
    case OpKind::kAllReduce: return {0, reference::reduce_on_hosts(dtype, op, parts, hosts())};
    case OpKind::kReduceScatter:
      return slice_bytes(reference::reduce_on_hosts(dtype, op, parts, hosts()), group().rank());
    case OpKind::kBroadcast: return {0, parts[static_cast<std::size_t>(root)]};
    case OpKind::kAllGather: {
      Expected all;
      for (int r = 0; r < group().size(); ++r) {
        const Expected slice = slice_bytes(parts[static_cast<std::size_t>(r)], r);
        all.bytes.insert(all.bytes.end(), slice.bytes.begin(), slice.bytes.end());
      }
      return all;
    }
    case OpKind::kBarrier: break;
  }
  return {};
}

Work issue(OpKind kind, const Region& region, ReduceOp op, int root) {
  switch (kind) {
    case OpKind::kAllReduce: return group().all_reduce(region, op);
    case OpKind::kReduceScatter: return group().reduce_scatter(region, op);
    case OpKind::kAllGather: return group().all_gather(region);
    case OpKind::kBroadcast: return group().broadcast(region, root);
    case OpKind::kReduce: return group().reduce(region, op, root);
    case OpKind::kBarrier: break;
  }
  return group().barrier();
}

void fill(const Region& region, std::uint64_t seed) {
  const Bytes mine = reference::contribution(region.dtype, region.count, seed, group().rank());
  if (!mine.empty()) std::memcpy(region.data(), mine.data(), mine.size());
}

bool holds(const Region& region, const Expected& expected) {
  return expected.bytes.empty() ||
         std::memcmp(region.data() + expected.begin, expected.bytes.data(), expected.bytes.size()) == 0;
}

/// Runs one operation with guard bytes round its region.
::testing::AssertionResult check(Arena& arena, OpKind kind, DType dtype, ReduceOp op, std::size_t count, int root,
                                 std::uint64_t seed) {
  const Region region{&arena, kArenaAlignment, count, dtype};
  constexpr auto kGuard = std::byte{0xa7};
  std::memset(arena.data(), static_cast<int>(kGuard), kArenaAlignment);
  std::memset(region.data() + region.bytes(), static_cast<int>(kGuard), kArenaAlignment);
  fill(region, seed);
  issue(kind, region, op, root).wait_host();
  const auto where = fmt::format("{} ({}) of {} {} from root {} on rank {} of {}", name_of(kind), name_of(op), count,
                                 lockstep::name_of(dtype), root, group().rank(), group().size());
  if (!holds(region, expected_of(kind, dtype, op, count, root, seed)))
    return ::testing::AssertionFailure() << "wrong bits after " << where;
  for (std::size_t i = 0; i < kArenaAlignment; ++i)
    if (arena.data()[i] != kGuard || region.data()[region.bytes() + i] != kGuard)
      return ::testing::AssertionFailure() << "bytes outside the region were written by " << where;
  return ::testing::AssertionSuccess();
}

std::vector<std::size_t> counts_of(DType dtype) {
  std::vector<std::size_t> counts = {0, 1, 2, 3, 63, 64, 65, 1000};
  // Round the limit between small and sliced allreduces for any number of ranks.
  const std::size_t element = size_of(dtype);
  for (const std::size_t ranks : {2u, 3u, 4u, 5u})
    for (const std::size_t count :
         {16384 / (ranks - 1) / element - 1, 16384 / (ranks - 1) / element, 16384 / (ranks - 1) / element + 1})
      counts.push_back(count);
  return counts;
}

TEST(Collectives, MatchPlainLoops) {
  const auto arena = group().allocate(64 * 1024);
  std::uint64_t seed = 1;
  for (const DType dtype : reference::kDTypes)
    for (const std::size_t count : counts_of(dtype)) {
      for (const ReduceOp op : reference::kReduceOps) {
        ASSERT_TRUE(check(*arena, OpKind::kAllReduce, dtype, op, count, 0, ++seed));
        ASSERT_TRUE(check(*arena, OpKind::kReduceScatter, dtype, op, count, 0, ++seed));
        ASSERT_TRUE(check(*arena, OpKind::kReduce, dtype, op, count, static_cast<int>(count) % group().size(), ++seed));
      }
      ASSERT_TRUE(check(*arena, OpKind::kAllGather, dtype, ReduceOp::kSum, count, 0, ++seed));
      for (int root = 0; root < group().size(); ++root)
        ASSERT_TRUE(check(*arena, OpKind::kBroadcast, dtype, ReduceOp::kSum, count, root, ++seed));
    }
}

TEST(Collectives, LargeRegionsAroundChunkEdges) {
  const std::size_t chunk = 1 << 20;
  const auto ranks = static_cast<std::size_t>(group().size());
  const auto arena = group().allocate(ranks * 2 * chunk + 4096);
  std::uint64_t seed = 1000;
  for (const std::size_t bytes : {chunk, ranks * chunk - 64, ranks * chunk, ranks * chunk + 4, ranks * 2 * chunk + 4}) {
    for (const OpKind kind :
         {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kReduce})
      ASSERT_TRUE(check(*arena, kind, DType::kF32, ReduceOp::kSum, bytes / 4, group().size() - 1, ++seed));
    ASSERT_TRUE(check(*arena, OpKind::kAllReduce, DType::kBF16, ReduceOp::kSum, bytes / 2 - 1, 0, ++seed));
  }
  // Round the sizes from which a reduction in shared memory looks ahead: of a whole region, and of a slice.
  for (const std::size_t bytes : {std::size_t{1} << 18, ranks << 15})
    for (const std::size_t more : {0u, 8u, 64u, 4096u})
      for (const DType dtype : reference::kDTypes)
        for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce})
          for (const std::size_t size : {bytes - more, bytes + more})
            ASSERT_TRUE(check(*arena, kind, dtype, ReduceOp::kSum, size / size_of(dtype), 0, ++seed));
}

// What each host sends is rounded; within one host, and over MPI, there is nothing to send before the end.
TEST(Collectives, SumsRoundedPerHost) {
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const std::size_t count : {1u, 65u, 5'000u, 300'001u}) {
      const auto arena = group().allocate(align_up(count * size_of(dtype)));
      const Region region{arena.get(), 0, count, dtype};
      fill(region, count);
      group().all_reduce(region, ReduceOp::kSum, -1, Rounding::kPerHost).wait_host();
      const auto parts = reference::contributions(dtype, count, count, group().size());
      const Expected expected{0, reference::reduce_rounding_hosts(dtype, ReduceOp::kSum, parts, hosts())};
      ASSERT_TRUE(holds(region, expected)) << count << " " << lockstep::name_of(dtype);
    }
}

TEST(Collectives, RandomSequencesWithManyUnderWay) {
  // Eight regions, each with an operation under way at any time; the same choices on every rank.
  constexpr std::size_t kRegions = 8, kRegionBytes = 300'000;
  const auto arena = group().allocate(kRegions * kRegionBytes);
  std::mt19937_64 random(20240229);
  struct UnderWay {
    Work work;
    Region region;
    Expected expected;
    std::string what;
  };
  std::vector<UnderWay> under_way(kRegions);
  const auto finish = [](UnderWay& op) {
    op.work.wait_host();
    if (op.region.arena == nullptr) return;
    ASSERT_TRUE(holds(op.region, op.expected)) << op.what;
  };
  for (std::uint64_t i = 0; i < 600; ++i) {
    const std::size_t place = random() % kRegions;
    ASSERT_NO_FATAL_FAILURE(finish(under_way[place]));
    const auto kind = static_cast<OpKind>(random() % 6);
    const DType dtype = reference::kDTypes[random() % std::size(reference::kDTypes)];
    const ReduceOp op = reference::kReduceOps[random() % std::size(reference::kReduceOps)];
    const int root = static_cast<int>(random() % static_cast<std::uint64_t>(group().size()));
    const std::size_t most = kRegionBytes / 8 >> (random() % 12);
    const Region region{arena.get(), place * kRegionBytes, random() % (most + 1), dtype};
    UnderWay& next = under_way[place];
    next.region = {};
    if (kind != OpKind::kBarrier) {
      fill(region, i);
      next.region = region;
      next.expected = expected_of(kind, dtype, op, region.count, root, i);
      next.what = fmt::format("operation {}: {} {} of {} {}", i, name_of(kind), name_of(op), region.count,
                              lockstep::name_of(dtype));
    }
    next.work = issue(kind, region, op, root);
    // Ranks drift apart, each in its own way.
    if (reference::mix(i, group().rank(), 0) % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    if (reference::mix(i, group().rank(), 1) % 4 == 0) group().poll();
  }
  for (UnderWay& op : under_way) ASSERT_NO_FATAL_FAILURE(finish(op));
}

TEST(Collectives, ManyMoreThanTheWindow) {
  constexpr std::size_t kOps = 300;
  const auto arena = group().allocate(kOps * kArenaAlignment);
  std::vector<Work> works;
  for (std::size_t i = 0; i < kOps; ++i) {
    const Region region{arena.get(), i * kArenaAlignment, 5, DType::kI64};
    fill(region, i);
    works.push_back(group().all_reduce(region, ReduceOp::kSum));
  }
  // Waiting for the last is waiting for all.
  works.back().wait_host();
  for (std::size_t i = 0; i < kOps; ++i) {
    EXPECT_TRUE(works[i].done());
    const Region region{arena.get(), i * kArenaAlignment, 5, DType::kI64};
    ASSERT_TRUE(holds(region, expected_of(OpKind::kAllReduce, DType::kI64, ReduceOp::kSum, 5, 0, i))) << i;
  }
}

TEST(Collectives, DoneBecomesTrueWithoutAWait) {
  const auto arena = group().allocate(4096);
  const Region region{arena.get(), 0, 1024, DType::kF32};
  fill(region, 5);
  const Work work = group().all_reduce(region, ReduceOp::kSum);
  const auto deadline = Deadline::after_seconds(30);
  while (!work.done()) ASSERT_FALSE(deadline.expired());
  EXPECT_TRUE(holds(region, expected_of(OpKind::kAllReduce, DType::kF32, ReduceOp::kSum, 1024, 0, 5)));
}

// Longer than the patience after which ranks compare where they are: being late is no error.
TEST(Collectives, ALateRankIsWaitedFor) {
  const auto arena = group().allocate(1 << 20);
  for (const std::size_t count : {1ul, 200'000ul}) {
    const Region region{arena.get(), 0, count, DType::kF32};
    fill(region, count);
    if (group().size() > 1 && group().rank() == group().size() - 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    group().all_reduce(region, ReduceOp::kSum).wait_host();
    EXPECT_TRUE(holds(region, expected_of(OpKind::kAllReduce, DType::kF32, ReduceOp::kSum, count, 0, count)));
  }
  group().barrier().wait_host();
}

TEST(Collectives, ABarrierWaitsForEveryRank) {
  // Each rank in turn comes late; nobody may leave before it has come.
  const auto arena = group().allocate(64);
  for (int late = 0; late < group().size(); ++late) {
    if (group().rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto came = Clock::now().time_since_epoch().count();
    group().barrier().wait_host();
    const auto left = Clock::now().time_since_epoch().count();
    // The steady clock is one for all processes of a host.
    arena->view<std::int64_t>(0, 1)[0] = came;
    group().all_reduce({arena.get(), 0, 1, DType::kI64}, ReduceOp::kMax).wait_host();
    EXPECT_LE(arena->view<std::int64_t>(0, 1)[0], left);
  }
}

TEST(Collectives, ObjectsOfAnySize) {
  for (const std::size_t base : {0ul, 1ul, 4095ul, 4096ul, 4097ul, 10'000ul}) {
    // Another size on every rank, none on rank 0.
    const auto text_of = [&](int rank) {
      return std::string(base * static_cast<std::size_t>(rank), static_cast<char>('a' + rank));
    };
    const auto texts = group().all_gather_text(text_of(group().rank()));
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(group().size()));
    for (int r = 0; r < group().size(); ++r) ASSERT_EQ(texts[static_cast<std::size_t>(r)], text_of(r));
  }
  const std::string mine = fmt::format("rank {}", group().rank());
  const int root = group().size() - 1;
  const auto gathered = group().gather_objects(std::as_bytes(std::span(mine)), root);
  EXPECT_EQ(gathered.size(), group().rank() == root ? static_cast<std::size_t>(group().size()) : 0u);
}

TEST(Collectives, ArenasAreZeroedAndPageAligned) {
  for (const std::size_t bytes : {0ul, 1ul, 4097ul, 1ul << 20}) {
    const auto arena = group().allocate(bytes);
    EXPECT_EQ(arena->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena->data()) % 4096, 0u);
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(arena->data()[i], std::byte{0});
  }
  EXPECT_THROW(group().allocate(std::numeric_limits<std::size_t>::max()), std::bad_alloc);
}

TEST(Collectives, CopyAndZeroReachAnArena) {
  constexpr std::size_t kCount = 1000;
  const auto arena = group().allocate(kCount * sizeof(std::int32_t));
  const Region whole{arena.get(), 0, kCount, DType::kI32};
  std::vector<std::int32_t> there(kCount, group().rank() + 1), back(kCount, -1);
  group().copy(arena->data(), there.data(), whole.bytes());
  group().all_reduce(whole, ReduceOp::kMax).wait(StreamView{});
  group().copy(back.data(), arena->data(), whole.bytes());
  EXPECT_EQ(back, std::vector<std::int32_t>(kCount, group().size()));

  // Before whatever is issued afterwards, and no more than was asked for.
  group().zero({arena.get(), 4, kCount - 2, DType::kI32});
  group().all_reduce(whole, ReduceOp::kSum).wait(StreamView{});
  group().copy(back.data(), arena->data(), whole.bytes());
  std::vector<std::int32_t> wanted(kCount, 0);
  wanted.front() = wanted.back() = group().size() * group().size();
  EXPECT_EQ(back, wanted);
  group().copy(nullptr, nullptr, 0);
  group().zero({arena.get(), 4, 0, DType::kI32});
  EXPECT_THROW(group().zero({arena.get(), 4, kCount, DType::kI32}), UsageError);
}

// See Note [Copies of other ranks]: each rank writes its slice into all copies.
TEST(Collectives, CopiesOfOtherRanks) {
  constexpr std::size_t kCount = 10007;
  const auto arena = group().allocate(kCount * sizeof(std::int32_t));
  const int size = group().size(), rank = group().rank();
  EXPECT_EQ(arena->copy_of(rank), arena->data());
  EXPECT_THROW(arena->copy_of(-1), UsageError);
  EXPECT_THROW(arena->copy_of(size), UsageError);
  const bool seen = size == 1 || group().name() == "shm";
  for (int other = 0; other < size; ++other) EXPECT_EQ(arena->copy_of(other) != nullptr, seen || other == rank);
  if (!seen || group().device().kind != DeviceKind::kCpu) return;
  const Slice mine = slice_of(kCount, sizeof(std::int32_t), rank, size);
  for (std::int32_t round = 1; round < 100; ++round) {
    for (int other = 0; other < size; ++other) {
      auto* const theirs = reinterpret_cast<std::int32_t*>(arena->copy_of(other));
      std::fill_n(theirs + mine.begin, mine.count, round * 100 + rank);
    }
    group().barrier().wait_host();
    const auto values = arena->view<std::int32_t>(0, kCount);
    for (int owner = 0; owner < size; ++owner) {
      const Slice slice = slice_of(kCount, sizeof(std::int32_t), owner, size);
      const auto found = values.subspan(slice.begin, slice.count);
      ASSERT_TRUE(std::ranges::all_of(found, [&](std::int32_t value) { return value == round * 100 + owner; }));
    }
    group().barrier().wait_host();
  }
}

TEST(Collectives, MisuseIsARecoverableUsageError) {
  const auto arena = group().allocate(64);
  EXPECT_THROW(group().all_reduce({arena.get(), 0, 17, DType::kF32}, ReduceOp::kSum), UsageError);
  EXPECT_THROW(group().all_reduce({arena.get(), 2, 1, DType::kF32}, ReduceOp::kSum), UsageError);
  EXPECT_THROW(group().all_reduce({arena.get(), 128, 0, DType::kF32}, ReduceOp::kSum), UsageError);
  EXPECT_THROW(group().all_reduce({}, ReduceOp::kSum), UsageError);
  EXPECT_THROW(group().broadcast({arena.get(), 0, 1, DType::kF32}, group().size()), UsageError);
  EXPECT_THROW(group().broadcast({arena.get(), 0, 1, DType::kF32}, -1), UsageError);
  EXPECT_THROW(group().reduce({arena.get(), 0, 1, DType::kF32}, ReduceOp::kSum, group().size()), UsageError);
  group().barrier().wait_host();
}

TEST(Collectives, OnlyArenasOfTheGroup) {
  SelfGroup other(std::chrono::seconds(1));
  const auto foreign = other.allocate(64);
  EXPECT_THROW(group().all_reduce({foreign.get(), 0, 1, DType::kF32}, ReduceOp::kSum), UsageError);
  EXPECT_THROW(group().zero({foreign.get(), 0, 1, DType::kF32}), UsageError);
  auto arena = group().allocate(64);
  const Region gone{arena.get(), 0, 1, DType::kF32};
  group().all_reduce(gone, ReduceOp::kSum).wait_host();
  arena.reset();
  EXPECT_THROW(group().all_reduce(gone, ReduceOp::kSum), UsageError);
  EXPECT_THROW(other.all_reduce(gone, ReduceOp::kSum), UsageError);
  group().barrier().wait_host();
}

// Where nothing waits for operations on an arena, but they are known to be done, it may go.
TEST(Collectives, ArenasMayBeFreedAfterTheirWork) {
  const auto kept = group().allocate(1 << 20);
  for (int i = 0; i < 20; ++i) {
    const auto arena = group().allocate(1 << 20);
    group().all_reduce({arena.get(), 0, 1 << 18, DType::kF32}, ReduceOp::kSum);
    group().all_reduce({kept.get(), 0, 1, DType::kF32}, ReduceOp::kSum).wait_host();
  }
  group().barrier().wait_host();
}

// Over the edges of what is staged at a time; uneven parts, of more than one type.
TEST(Collectives, HostBuffers) {
  const auto ranks = static_cast<std::size_t>(group().size()), own = static_cast<std::size_t>(group().rank());
  for (const std::size_t count : {0u, 1u, 7u, 1'000u, 300'001u}) {
    std::vector<std::int64_t> mine(count), all(count * ranks, -1);
    for (std::size_t i = 0; i < count; ++i) mine[i] = static_cast<std::int64_t>(i * ranks + own);
    group().all_gather(std::span<const std::int64_t>(mine), std::span(all));
    std::size_t wrong = 0;
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < count; ++i)
        if (all[r * count + i] != static_cast<std::int64_t>(i * ranks + r)) ++wrong;
    // What each rank has now is the same: its part of the sum is as often that.
    group().reduce_scatter(std::span<const std::int64_t>(all), std::span(mine));
    for (std::size_t i = 0; i < count; ++i)
      if (mine[i] != static_cast<std::int64_t>((i * ranks + own) * ranks)) ++wrong;
    // The root alone has the sum afterwards.
    group().reduce(std::span(mine), group().size() - 1);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t sum = own + 1 == ranks ? i * ranks * ranks + ranks * (ranks - 1) / 2 : i * ranks + own;
      if (mine[i] != static_cast<std::int64_t>(sum * ranks)) ++wrong;
    }
    std::vector<std::uint8_t> bytes(count, static_cast<std::uint8_t>(own + 3));
    group().broadcast(std::span(bytes), group().size() - 1);
    for (const auto byte : bytes)
      if (byte != ranks + 2) ++wrong;
    EXPECT_EQ(wrong, 0u) << count;
  }
  std::vector<float> three(3), too_few(3 * ranks - 1);
  EXPECT_THROW(group().all_gather(std::span<const float>(three), std::span(too_few)), UsageError);
  EXPECT_THROW(group().reduce_scatter(std::span<const float>(too_few), std::span(three)), UsageError);
}

}  // namespace
}  // namespace lockstep::comm
