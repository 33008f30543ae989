// A reducer, its group and its hooks in a program that uses them wrongly.
#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/reducer.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::ddp {
namespace {

using lockstep::testing::group;

const std::vector<SlotSpec> kSlots = {{"a", 3}, {"b", 70}, {"c", 5}};

TEST(ReducerMisuse, AGroupThatEndsFirst) {
  auto part = group().duplicate();
  Reducer reducer(*part, kSlots, {});
  part->shutdown();
  part.reset();
  const char* const refused = "of a reducer whose group has ended → keep the group";
  EXPECT_REFUSED(refused, reducer.gradient<float>(0));
  EXPECT_REFUSED(refused, reducer.begin_step(1));
  EXPECT_REFUSED(refused, reducer.poll());
  EXPECT_REFUSED(refused, reducer.observed_order());
  EXPECT_REFUSED(refused, reducer.bytes_sent());
  EXPECT_REFUSED(refused, reducer.rebuild_buckets({0, 1, 2}));
  EXPECT_REFUSED(refused, reducer.register_comm_hook(make_comm_hook("bf16")));
}

TEST(ReducerMisuse, InvalidBucketsOrWithinAStep) {
  Reducer reducer(group(), kSlots, {});
  const auto before = reducer.order();
  for (int round = 0; round < 2; ++round)
    EXPECT_REFUSED("unknown or stands twice", reducer.rebuild_buckets({0, 7, 1}, 64));
  EXPECT_EQ(reducer.order(), before);
  EXPECT_NE(reducer.limits().bucket_bytes, 64u);
  reducer.begin_step(1);
  reducer.gradient<float>(0)[2] = 5;
  EXPECT_REFUSED("other buckets within a step", reducer.rebuild_buckets({0, 1, 2}));
  for (std::size_t slot = 0; slot < kSlots.size(); ++slot) reducer.mark_ready(slot);
  reducer.finish({}, [](std::span<const std::size_t>) {});
  EXPECT_EQ(reducer.gradient<float>(0)[2], 5.0f * static_cast<float>(group().size()));
  EXPECT_TRUE(reducer.rebuild_buckets({0, 1, 2}));
}

TEST(ReducerMisuse, InvalidSlotsAndSizes) {
  Reducer reducer(group(), kSlots, {});
  EXPECT_REFUSED("slot 1000000, where there are 3", reducer.decided(1'000'000));
  EXPECT_REFUSED("a multiple of 0 bytes",
                 plan_buckets(kSlots, std::vector<std::size_t>{0, 1, 2}, {.slot_alignment = 0}));
}

// Questions have answers before a reducer has it, and when that has ended.
TEST(ReducerMisuse, AHookOutsideOfItsReducer) {
  for (const char* const spec : {"bf16", "fp16", "topk:0.1", "powersgd:2"}) {
    SCOPED_TRACE(spec);
    const auto hook = make_comm_hook(spec);
    EXPECT_EQ(hook->bytes_sent(0, 2), std::nullopt);
    EXPECT_EQ(hook->fallbacks(), 0);
    hook->state();
    {
      Reducer reducer(group(), kSlots, {});
      reducer.register_comm_hook(hook);
      EXPECT_TRUE(hook->bytes_sent(0, 2).has_value());
    }
    EXPECT_TRUE(hook->bytes_sent(0, 2).has_value());
    hook->state();
  }
}

}  // namespace
}  // namespace lockstep::ddp
