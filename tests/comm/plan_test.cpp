// Which bytes cross which link.
#include "comm/hosts/plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "lockstep/comm/op.h"

namespace lockstep::comm {
namespace {

const std::vector<Hosts> kLayouts = {
    {{0}, {1}}, {{0}, {1}, {2}}, {{0, 1}, {2}}, {{0, 1, 2}, {3}}, {{0, 1}, {2, 3}, {4}}, {{0, 2, 4}, {1, 3}},
};

int channels_of(const Hosts& hosts) {
  std::size_t least = hosts[0].size();
  for (const auto& ranks : hosts) least = std::min(least, ranks.size());
  return static_cast<int>(least);
}

Op op_of(OpKind kind, std::size_t count, DType dtype = DType::kF32, int root = 0) {
  Op op;
  op.kind = kind;
  op.root = root;
  op.count = count;
  op.dtype = dtype;
  return op;
}

constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
                             OpKind::kReduce};

TEST(Plan, LargeRegionsArePartitionedByHostAndChannel) {
  for (const Hosts& hosts : kLayouts)
    for (const OpKind kind : kKinds)
      for (const std::size_t count : {5'000ul, 65'536ul, 1'000'003ul}) {
        const Op op = op_of(kind, count);
        const HostTuning tuning;
        const Plan plan(op, hosts, channels_of(hosts), tuning);
        ASSERT_FALSE(plan.small());
        std::vector<int> covered(op.bytes() / 4);
        for (int host = 0; host < static_cast<int>(hosts.size()); ++host)
          for (int channel = 0; channel < channels_of(hosts); ++channel)
            for (std::uint32_t c = 0; c < plan.chunk_count(host, channel); ++c) {
              const Chunk chunk = plan.chunk(host, channel, c);
              ASSERT_EQ(chunk.begin % 64, 0u);
              ASSERT_GT(chunk.bytes, 0u);
              ASSERT_LE(plan.wire_bytes(chunk, 0), tuning.chunk_bytes);
              for (std::size_t at = chunk.begin; at < chunk.begin + chunk.bytes; at += 4) ++covered[at / 4];
            }
        for (std::size_t i = 0; i < covered.size(); ++i) ASSERT_EQ(covered[i], 1) << name_of(kind) << " at " << i;
      }
}

TEST(Plan, RanksHaveTheirSlicesOnTheirHosts) {
  for (const Hosts& hosts : kLayouts) {
    int ranks = 0;
    for (const auto& host : hosts) ranks += static_cast<int>(host.size());
    const Op op = op_of(OpKind::kReduceScatter, 100'000);
    const Plan plan(op, hosts, channels_of(hosts), {});
    for (int host = 0; host < static_cast<int>(hosts.size()); ++host)
      for (std::uint32_t c = 0; c < plan.chunk_count(host, 0); ++c) {
        const Chunk chunk = plan.chunk(host, 0, c);
        const Slice slice = slice_of(op.count, 4, chunk.rank, ranks);
        EXPECT_GE(chunk.begin, slice.begin * 4);
        EXPECT_LE(chunk.begin + chunk.bytes, (slice.begin + slice.count) * 4);
        EXPECT_EQ(std::count(hosts[static_cast<std::size_t>(host)].begin(), hosts[static_cast<std::size_t>(host)].end(),
                             chunk.rank),
                  1);
      }
  }
}

TEST(Plan, SmallRegionsTakeOneMessageEachWay) {
  for (const Hosts& hosts : kLayouts)
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kBarrier})
      for (const std::size_t count : {0ul, 1ul, 60ul}) {
        const Plan plan(op_of(kind, count), hosts, channels_of(hosts), {});
        ASSERT_TRUE(plan.small());
        for (int host = 0; host < static_cast<int>(hosts.size()); ++host) {
          ASSERT_EQ(plan.chunk_count(host, 0), 1u);
          EXPECT_EQ(plan.chunk(host, 0, 0).bytes, count * 4);
          for (int channel = 1; channel < channels_of(hosts); ++channel) EXPECT_EQ(plan.chunk_count(host, channel), 0u);
          for (int other = 0; other < static_cast<int>(hosts.size()); ++other) EXPECT_FALSE(plan.gathers(host, other));
        }
      }
}

TEST(Plan, OnlyTheRootsHostContributesToABroadcast) {
  const Hosts hosts = {{0, 2, 4}, {1, 3}};
  const Plan plan(op_of(OpKind::kBroadcast, 100'000, DType::kF32, 3), hosts, 2, {});
  EXPECT_FALSE(plan.scatters(0));
  EXPECT_TRUE(plan.scatters(1));
  EXPECT_TRUE(plan.gathers(1, 0));
  EXPECT_FALSE(plan.gathers(0, 1));  // it has them all
}

TEST(Plan, OnlyTheRootsHostGetsWhatIsReduced) {
  const Hosts hosts = {{0, 2, 4}, {1, 3}, {5}};
  const Plan plan(op_of(OpKind::kReduce, 100'000, DType::kF32, 3), hosts, 1, {});
  for (int host = 0; host < 3; ++host) {
    EXPECT_TRUE(plan.scatters(host));
    EXPECT_GT(plan.chunk_count(host, 0), 0u);
    EXPECT_EQ(plan.ends_at(host), host == 1);
    for (int other = 0; other < 3; ++other) EXPECT_EQ(plan.gathers(host, other), host != 1 && other == 1);
  }
  const Plan small(op_of(OpKind::kReduce, 60, DType::kF32, 3), hosts, 1, {});
  ASSERT_TRUE(small.small());
  for (int host = 0; host < 3; ++host) {
    EXPECT_EQ(small.chunk_count(host, 0), host == 1 ? 1u : 0u);
    for (int other = 0; other < 3; ++other) EXPECT_FALSE(small.gathers(host, other));
  }
}

TEST(Plan, Bf16SumsOfSeveralRanksAreSentAsF32) {
  const Op op = op_of(OpKind::kAllReduce, 100'000, DType::kBF16);
  EXPECT_FALSE(Plan(op, {{0}, {1}}, 1, {}).widened());
  const Hosts hosts = {{0, 1}, {2}};
  const Plan plan(op, hosts, 1, {});
  EXPECT_TRUE(plan.widened());
  EXPECT_EQ(plan.wire_bytes(plan.chunk(0, 0, 0), 0), 2 * plan.chunk(0, 0, 0).bytes);
  // Each host's sum is rounded where that was asked for.
  Op rounded = op;
  rounded.tree = OpDescriptor::kRoundedPerHost;
  const Plan narrow(rounded, hosts, 1, {});
  EXPECT_FALSE(narrow.widened());
  EXPECT_EQ(narrow.wire_bytes(narrow.chunk(0, 0, 0), 0), narrow.chunk(0, 0, 0).bytes);
  Op least = op;
  least.reduce = ReduceOp::kMin;
  EXPECT_FALSE(Plan(least, hosts, 1, {}).widened());
}

}  // namespace
}  // namespace lockstep::comm
