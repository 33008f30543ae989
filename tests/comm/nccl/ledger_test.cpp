// What the NCCL group keeps of its operations.
#include "comm/nccl/ledger.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

Op op(std::uint64_t sequence, std::int64_t step = -1) {
  Op made;
  made.sequence = sequence;
  made.step = step;
  return made;
}

void launch(Ledger& ledger, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) ledger.launch(op(ledger.launched() + 1));
}

TEST(Ledger, KnowsTheFirstThatIsNotDone) {
  Ledger ledger;
  EXPECT_FALSE(ledger.any_under_way());
  launch(ledger, 10);
  ledger.complete(7);
  EXPECT_TRUE(ledger.any_under_way());
  EXPECT_EQ(ledger.first_under_way().sequence, 8u);
  ledger.complete(10);
  EXPECT_FALSE(ledger.any_under_way());
  EXPECT_THROW(ledger.launch(op(12)), InternalError);
}

TEST(Ledger, SaysWhatIsInTheWay) {
  Ledger ledger;
  EXPECT_EQ(ledger.in_the_way_of(1024), 0u);
  launch(ledger, 1024);
  EXPECT_EQ(ledger.in_the_way_of(1), 1u);
  EXPECT_EQ(ledger.in_the_way_of(24), 24u);
  ledger.complete(24);
  EXPECT_EQ(ledger.in_the_way_of(24), 0u);
  launch(ledger, 24);
  EXPECT_EQ(ledger.first_under_way().sequence, 25u);
}

TEST(Ledger, TimePassesWhileNothingEnds) {
  Ledger ledger;
  launch(ledger, 1);
  const auto first = ledger.progress();
  std::this_thread::sleep_for(2ms);
  launch(ledger, 1);
  EXPECT_EQ(ledger.progress(), first) << "another launch is no progress";
  ledger.complete(1);
  const auto second = ledger.progress();
  EXPECT_GT(second, first);
  ledger.complete(1);
  EXPECT_EQ(ledger.progress(), second);
  ledger.complete(2);
  std::this_thread::sleep_for(2ms);
  const auto before = Clock::now();
  launch(ledger, 1);
  EXPECT_GE(ledger.progress(), before) << "it waits from its launch on";
}

TEST(Ledger, CapturedOperationsCountWithEachLaunch) {
  Ledger ledger;
  launch(ledger, 3);
  ledger.complete(1);
  ledger.begin_capture();
  for (std::uint64_t i = 0; i < 900; ++i) ledger.capture(op(4 + i, 1));
  EXPECT_EQ(ledger.end_capture(), 900u);
  EXPECT_EQ(ledger.launched(), 3u);
  EXPECT_EQ(ledger.first_under_way().sequence, 2u) << "the ring has grown";
  EXPECT_TRUE(ledger.has_captured(900));
  EXPECT_FALSE(ledger.has_captured(3));
  ledger.complete(3);
  // One launch under way and one more have room.
  ledger.replay(900, 7);
  EXPECT_EQ(ledger.in_the_way_of(900), 0u);
  ledger.replay(900, 8);
  EXPECT_EQ(ledger.launched(), 1803u);
  ledger.complete(903);
  EXPECT_EQ(ledger.first_under_way().sequence, 904u);
  EXPECT_EQ(ledger.first_under_way().step, 8);

  // A capture that has come to nothing.
  ledger.begin_capture();
  EXPECT_EQ(ledger.end_capture(), 0u);
  EXPECT_EQ(ledger.launched(), 1803u);
}

// A graph counts on the GPU before the host has noted its launch.
TEST(Ledger, TheGpuMayBeAhead) {
  Ledger ledger;
  ledger.begin_capture();
  ledger.capture(op(1));
  ledger.capture(op(2));
  ledger.end_capture();
  ledger.complete(2);
  EXPECT_FALSE(ledger.any_under_way());
  EXPECT_EQ(ledger.in_the_way_of(2), 0u);
  ledger.replay(2, 0);
  EXPECT_FALSE(ledger.any_under_way());
  launch(ledger, 1);
  EXPECT_EQ(ledger.first_under_way().sequence, 3u);
}

// What a graph repeats is in the history as what is issued.
TEST(Ledger, HistoriesTellStepsApart) {
  const auto replayed = [](std::int64_t second) {
    Ledger ledger;
    ledger.launch(op(1, 1));
    ledger.begin_capture();
    ledger.capture(op(2, 1));
    EXPECT_EQ(ledger.end_capture(), 1u);
    ledger.replay(1, 2);
    ledger.replay(1, second);
    return ledger.last().history;
  };
  Ledger issued;
  EXPECT_EQ(issued.last(), OpDescriptor());
  for (const std::uint64_t sequence : {1, 2, 3}) issued.launch(op(sequence, static_cast<std::int64_t>(sequence)));
  EXPECT_TRUE(is_same_operation(issued.last(), op(3, 3)));
  EXPECT_EQ(replayed(3), issued.last().history);
  EXPECT_NE(replayed(4), issued.last().history);
}

}  // namespace
}  // namespace lockstep::comm
