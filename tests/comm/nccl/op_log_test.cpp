// What the NCCL group keeps of its operations.
#include "comm/nccl/op_log.h"

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

void launch(OpLog& op_log, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) op_log.launch(op(op_log.launched() + 1));
}

TEST(OpLog, FindsTheFirstIncompleteOperation) {
  OpLog op_log;
  EXPECT_FALSE(op_log.any_under_way());
  launch(op_log, 10);
  op_log.complete(7);
  EXPECT_TRUE(op_log.any_under_way());
  EXPECT_EQ(op_log.first_under_way().sequence, 8u);
  op_log.complete(10);
  EXPECT_FALSE(op_log.any_under_way());
  EXPECT_THROW(op_log.launch(op(12)), InternalError);
}

TEST(OpLog, FindsTheOperationThatBlocksASlot) {
  OpLog op_log;
  EXPECT_EQ(op_log.first_blocking(1024), 0u);
  launch(op_log, 1024);
  EXPECT_EQ(op_log.first_blocking(1), 1u);
  EXPECT_EQ(op_log.first_blocking(24), 24u);
  op_log.complete(24);
  EXPECT_EQ(op_log.first_blocking(24), 0u);
  launch(op_log, 24);
  EXPECT_EQ(op_log.first_under_way().sequence, 25u);
}

TEST(OpLog, TimePassesWhileNothingEnds) {
  OpLog op_log;
  launch(op_log, 1);
  const auto first = op_log.progress();
  std::this_thread::sleep_for(2ms);
  launch(op_log, 1);
  EXPECT_EQ(op_log.progress(), first) << "another launch is no progress";
  op_log.complete(1);
  const auto second = op_log.progress();
  EXPECT_GT(second, first);
  op_log.complete(1);
  EXPECT_EQ(op_log.progress(), second);
  op_log.complete(2);
  std::this_thread::sleep_for(2ms);
  const auto before = RunningClock::now();
  launch(op_log, 1);
  EXPECT_GE(op_log.progress(), before) << "it waits from its launch on";
}

TEST(OpLog, CapturedOperationsCountWithEachLaunch) {
  OpLog op_log;
  launch(op_log, 3);
  op_log.complete(1);
  op_log.begin_capture();
  for (std::uint64_t i = 0; i < 900; ++i) op_log.capture(op(4 + i, 1));
  EXPECT_EQ(op_log.end_capture(), 900u);
  EXPECT_EQ(op_log.launched(), 3u);
  EXPECT_EQ(op_log.first_under_way().sequence, 2u) << "the ring has grown";
  EXPECT_TRUE(op_log.has_captured(900));
  EXPECT_FALSE(op_log.has_captured(3));
  op_log.complete(3);
  // The log can hold one launch under way and one more.
  op_log.replay(900, 7);
  EXPECT_EQ(op_log.first_blocking(900), 0u);
  op_log.replay(900, 8);
  EXPECT_EQ(op_log.launched(), 1803u);
  op_log.complete(903);
  EXPECT_EQ(op_log.first_under_way().sequence, 904u);
  EXPECT_EQ(op_log.first_under_way().step, 8);

  // A capture that has come to nothing.
  op_log.begin_capture();
  EXPECT_EQ(op_log.end_capture(), 0u);
  EXPECT_EQ(op_log.launched(), 1803u);
}

// A graph counts on the GPU before the host has noted its launch.
TEST(OpLog, TheGpuMayBeAhead) {
  OpLog op_log;
  op_log.begin_capture();
  op_log.capture(op(1));
  op_log.capture(op(2));
  op_log.end_capture();
  op_log.complete(2);
  EXPECT_FALSE(op_log.any_under_way());
  EXPECT_EQ(op_log.first_blocking(2), 0u);
  op_log.replay(2, 0);
  EXPECT_FALSE(op_log.any_under_way());
  launch(op_log, 1);
  EXPECT_EQ(op_log.first_under_way().sequence, 3u);
}

// What a graph repeats is in the history as what is issued.
TEST(OpLog, HistoriesDistinguishSteps) {
  const auto replayed = [](std::int64_t second) {
    OpLog op_log;
    op_log.launch(op(1, 1));
    op_log.begin_capture();
    op_log.capture(op(2, 1));
    EXPECT_EQ(op_log.end_capture(), 1u);
    op_log.replay(1, 2);
    op_log.replay(1, second);
    return op_log.last().history;
  };
  OpLog issued;
  EXPECT_EQ(issued.last(), OpDescriptor());
  for (const std::uint64_t sequence : {1, 2, 3}) issued.launch(op(sequence, static_cast<std::int64_t>(sequence)));
  EXPECT_TRUE(is_same_operation(issued.last(), op(3, 3)));
  EXPECT_EQ(replayed(3), issued.last().history);
  EXPECT_NE(replayed(4), issued.last().history);
}

}  // namespace
}  // namespace lockstep::comm
