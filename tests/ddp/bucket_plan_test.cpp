#include "lockstep/ddp/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "lockstep/comm/arena.h"

namespace lockstep::ddp {
namespace {

using ::testing::ElementsAre;

std::vector<SlotSpec> slots_of(std::initializer_list<std::size_t> counts) {
  std::vector<SlotSpec> slots;
  for (const auto count : counts) slots.push_back({"p" + std::to_string(slots.size()), count, DType::kF32});
  return slots;
}

std::vector<std::size_t> in_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

TEST(BucketPlan, NoSlotsNoBuckets) {
  const auto plan = plan_buckets({}, {}, {});
  EXPECT_TRUE(plan.buckets.empty());
  EXPECT_EQ(plan.bytes, 0u);
}

TEST(BucketPlan, FollowsTheOrderAndAlignsSlots) {
  const auto slots = slots_of({1, 17, 16});
  const std::vector<std::size_t> order = {2, 0, 1};
  const auto plan = plan_buckets(slots, order, {});
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_THAT(plan.buckets[0].slots, ElementsAre(2, 0, 1));
  EXPECT_THAT(plan.slot_offset_bytes, ElementsAre(64, 128, 0));
  EXPECT_EQ(plan.buckets[0].bytes, 64u + 64u + 128u);
}

TEST(BucketPlan, TheFirstBucketHasItsOwnLimit) {
  const auto slots = slots_of({16, 16, 16, 16, 16});  // 64 bytes each
  const auto plan = plan_buckets(slots, in_order(5), {.first_bucket_bytes = 64, .bucket_bytes = 128});
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[0].slots, ElementsAre(0));
  EXPECT_THAT(plan.buckets[1].slots, ElementsAre(1, 2));
  EXPECT_THAT(plan.buckets[2].slots, ElementsAre(3, 4));
}

TEST(BucketPlan, ASlotLargerThanTheLimitHasABucketOfItsOwn) {
  const auto slots = slots_of({1, 1000, 1});
  const auto plan = plan_buckets(slots, in_order(3), {.first_bucket_bytes = 300, .bucket_bytes = 300});
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[1].slots, ElementsAre(1));
}

TEST(BucketPlan, OneElement) {
  const auto plan = plan_buckets(slots_of({1}), in_order(1), {.first_bucket_bytes = 1, .bucket_bytes = 1});
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_EQ(plan.buckets[0].bytes, comm::kArenaAlignment);
}

TEST(BucketPlan, AnotherDtypeStartsAnotherBucket) {
  auto slots = slots_of({4, 4, 4});
  slots[1].dtype = DType::kBF16;
  const auto plan = plan_buckets(slots, in_order(3), {});
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_EQ(plan.buckets[1].dtype, DType::kBF16);
}

TEST(BucketPlan, BytesDoNotDependOnOrderOrLimits) {
  const auto slots = slots_of({3, 100, 7, 1, 64, 33});
  auto order = in_order(slots.size());
  const std::size_t bytes = plan_buckets(slots, order, {}).bytes;
  do {
    for (const std::size_t limit : {std::size_t{1}, std::size_t{300}, std::size_t{1} << 20}) {
      const auto plan = plan_buckets(slots, order, {.first_bucket_bytes = limit, .bucket_bytes = limit});
      ASSERT_EQ(plan.bytes, bytes);
      // Every slot lies in its bucket, and nothing overlaps.
      std::vector<std::pair<std::size_t, std::size_t>> ranges;
      for (std::size_t s = 0; s < slots.size(); ++s) {
        const auto& bucket = plan.buckets[plan.slot_bucket[s]];
        ASSERT_GE(plan.slot_offset_bytes[s], bucket.offset_bytes);
        ASSERT_LE(plan.slot_offset_bytes[s] + 4 * slots[s].count, bucket.offset_bytes + bucket.bytes);
        ranges.emplace_back(plan.slot_offset_bytes[s], plan.slot_offset_bytes[s] + 4 * slots[s].count);
      }
      std::sort(ranges.begin(), ranges.end());
      for (std::size_t i = 1; i < ranges.size(); ++i) ASSERT_LE(ranges[i - 1].second, ranges[i].first);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(BucketPlan, RefusesOrdersThatAreNoPermutation) {
  const auto slots = slots_of({1, 2});
  EXPECT_THROW(plan_buckets(slots, std::vector<std::size_t>{0, 0}, {}), UsageError);
  EXPECT_THROW(plan_buckets(slots, std::vector<std::size_t>{0}, {}), UsageError);
  EXPECT_THROW(plan_buckets(slots, std::vector<std::size_t>{0, 2}, {}), UsageError);
}

}  // namespace
}  // namespace lockstep::ddp
