#include "lockstep/ddp/sharded_update.h"

#include <gtest/gtest.h>

#include <numeric>

#include "base/splitmix.h"

namespace lockstep::ddp {
namespace {

constexpr std::size_t kBlock = 512;  // elements

// Whatever the sizes: every element has one owner, nobody cuts a block, and owners of a bucket have equally much of it.
TEST(ShardedUpdate, ShareOutWholeBlocks) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::vector<SlotSpec> slots;
    const std::size_t number = 1 + SplitMix64::word(seed, 0) % 9;
    for (std::size_t i = 0; i < number; ++i)
      slots.push_back({"p", 1 + SplitMix64::word(seed, i + 1) % (i % 3 == 0 ? 20 : 5000), DType::kF32});
    std::vector<std::size_t> order(number);
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    for (const int ranks : {1, 2, 3, 7})
      for (const std::size_t limit : {std::size_t{1}, std::size_t{9000}, std::size_t{1} << 30}) {
        const BucketPlan plan = plan_buckets(slots, order,
                                             {.first_bucket_bytes = limit,
                                              .bucket_bytes = limit,
                                              .slot_alignment = kBlock * 4,
                                              .bucket_multiple = kBlock * 4 * static_cast<std::size_t>(ranks)});
        std::size_t bytes = 0;
        for (const Bucket& bucket : plan.buckets) {
          EXPECT_EQ(bucket.offset_bytes, bytes);
          EXPECT_EQ(bucket.bytes % (kBlock * 4 * static_cast<std::size_t>(ranks)), 0u);
          bytes += bucket.bytes;
        }
        EXPECT_EQ(plan.bytes, bytes);
        std::vector<std::size_t> done(number);
        for (int rank = 0; rank < ranks; ++rank) {
          const auto slices = slices_of_rank(plan, slots, rank, ranks);
          for (std::size_t slot = 0; slot < number; ++slot) {
            const auto [begin, count] = slices[slot];
            if (count == 0) continue;
            EXPECT_EQ(begin, done[slot]) << "in the order of the ranks, without a gap";
            EXPECT_EQ(begin % kBlock, 0u);
            EXPECT_TRUE(count % kBlock == 0 || begin + count == slots[slot].count);
            done[slot] += count;
          }
        }
        for (std::size_t slot = 0; slot < number; ++slot) EXPECT_EQ(done[slot], slots[slot].count);
      }
  }
}

}  // namespace
}  // namespace lockstep::ddp
