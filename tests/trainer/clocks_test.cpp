#include "trainer/trace.h"

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace lockstep::trainer {
namespace {

using std::chrono::microseconds;

Clock::time_point at(std::int64_t us) { return Clock::time_point(microseconds(us)); }

TEST(ClockBounds, HoldTheDifference) {
  // Rank 0's clock is 1000 µs ahead. Rank 0's reading travels for 30 µs, the other's for 5 µs; then 10 and 40.
  const std::vector<ClockExchange> exchanges = {
      {.sent_by_0 = at(1000), .received_by_0 = at(1025), .sent = at(20), .received = at(30)},
      {.sent_by_0 = at(2000), .received_by_0 = at(2050), .sent = at(1010), .received = at(1010)},
  };
  const ClockBounds bounds = clock_bounds(exchanges);
  EXPECT_EQ(bounds.least, microseconds(990));  // the second exchange's, whose reading from rank 0 came fastest
  EXPECT_EQ(bounds.most, microseconds(1005));  // the first exchange's
}

TEST(ClockBounds, RanksOfOneHostHaveOneClock) {
  EXPECT_EQ(ahead_of_this_clock(lockstep::testing::group()), Clock::duration::zero());
}

TEST(ClockBounds, ZeroLiesBetweenThoseMeasuredOnOneHost) {
  const ClockBounds bounds = clock_bounds(exchange_clocks(lockstep::testing::group(), 5));
  EXPECT_LE(bounds.least, Clock::duration::zero());
  EXPECT_GE(bounds.most, Clock::duration::zero());
  EXPECT_LT(bounds.most - bounds.least, std::chrono::seconds(60));  // they are bounds at all
}

}  // namespace
}  // namespace lockstep::trainer
