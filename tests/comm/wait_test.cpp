#include "comm/wait.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/shm/slot_board.h"
#include "comm/stall.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

/// What a wait does that gets `looks` looks, as letters: (l)ook, (c)heck, (s)leep.
std::string course_of(const WaitPolicy& policy, int looks, Deadline deadline = Deadline::never(), int moves_at = -1) {
  std::string course;
  int seen = 0;
  wait_until(
      policy, deadline, [&] { return seen == looks; },
      [&] {
        course += 'l';
        return ++seen == moves_at;
      },
      [&](Clock::duration) { course += 'c'; }, [&](Clock::duration) { course += 's'; });
  return course;
}

TEST(WaitUntil, PollsFirstAndThenSleepsBetweenPolls) {
  EXPECT_EQ(course_of({.spins = 2, .yields = 1, .check_every = 1h}, 6),
            "llll"
            "cs"
            "ls"
            "ls");
  EXPECT_EQ(course_of({.check_every = {}}, 3), "lcslcslcs");
}

TEST(WaitUntil, PollsAgainAfterASleep) {
  EXPECT_EQ(course_of({.spins = 2, .recovered = 1, .check_every = 1h}, 7),
            "lll"
            "cs"
            "ll"
            "s"
            "ll"
            "s");
}

TEST(WaitUntil, ProgressRestartsPolling) {
  EXPECT_EQ(course_of({.spins = 2, .check_every = 1h}, 7, Deadline::never(), 4),
            "lll"
            "cs"
            "l"
            "lll"
            "s");
}

TEST(WaitUntil, ADeadlineEndsItAfterOneCheck) {
  EXPECT_EQ(course_of({.spins = 1, .check_every = {}}, 100, Deadline::after({})), "llc");
  EXPECT_TRUE(wait_until(
      {}, Deadline::after({}), [] { return true; }, [] { return false; }, [](Clock::duration) {}, nap));
  bool done = false;
  EXPECT_TRUE(wait_until(
      {}, Deadline::after({}), [&] { return done; }, [] { return false; }, [&](Clock::duration) { done = true; }, nap))
      << "what a check brings about in time counts";
}

TEST(WaitUntil, ACheckEndsItByThrowing) {
  EXPECT_THROW(wait_until(
                   {}, Deadline::never(), [] { return false; }, [] { return false; },
                   [](Clock::duration) { throw std::runtime_error("a rank has ended"); }, nap),
               std::runtime_error);
}

class StallNotices : public ::testing::Test {
 protected:
  ~StallNotices() override { set_stall_warning(10s); }

  /// The seconds, of those until `seconds`, in which it is due; a look every 100 ms.
  std::vector<int> due(int seconds, std::uint64_t progress = 1) {
    std::vector<int> when;
    for (int look = 0; look < 10 * seconds; ++look) {
      now_ += 100ms;
      if (notice_.is_due(progress, now_)) when.push_back(static_cast<int>(notice_.waited_seconds()));
    }
    return when;
  }

  StallNotice notice_;
  Clock::time_point now_ = Clock::now();
};

TEST_F(StallNotices, ComeAfterTenSecondsAndThenLessOften) {
  EXPECT_THAT(due(200), ElementsAre(10, 20, 40, 80, 160));
  EXPECT_EQ(notice_.times(), 5u);
}

TEST_F(StallNotices, RestartAfterProgress) {
  EXPECT_THAT(due(15, 1), ElementsAre(10));
  EXPECT_THAT(due(9, 2), ElementsAre());
  EXPECT_THAT(due(25, 3), ElementsAre(10, 20));
}

TEST_F(StallNotices, IgnoreTimeSpentOutsideOfWaits) {
  EXPECT_THAT(due(8), ElementsAre());
  now_ += 60s;
  EXPECT_THAT(due(1), ElementsAre());
  EXPECT_THAT(due(3), ElementsAre(10));
}

TEST_F(StallNotices, CanBeDisabled) {
  set_stall_warning(0s);
  EXPECT_THAT(due(1000), ElementsAre());
}

/// Four ranks, this one the first, of which the test says what they have done.
class StallsOfFour : public StallNotices, private StallReports {
 protected:
  /// What is logged in so many seconds in which nothing moves.
  std::string said(int seconds, std::uint64_t moves = 1) {
    ::testing::internal::CaptureStderr();
    for (int look = 0; look < 10 * seconds; ++look) diagnosis_.look(op_, moves, now_ += 100ms);
    return ::testing::internal::GetCapturedStderr();
  }
  void find_states(const Op&, std::span<PeerState> states) override { std::ranges::copy(states_, states.begin()); }
  std::string suspect_text(int rank) const override { return fmt::format("rank {} (host b)", rank); }
  int job_rank(int rank) const override { return rank; }
  std::string other_cause() const override { return cause_; }
  bool speaks(const Op&, unsigned) override { return speaks_; }

  Op op_;
  std::vector<PeerState> states_ = std::vector<PeerState>(4);
  std::string cause_;
  bool speaks_ = true;
  StallDiagnosis diagnosis_{*this, 4, {.at_least = 12s, .confirms = 3s}};
};

TEST_F(StallsOfFour, TheMostSuspectAreNamedIfTheyStayIt) {
  states_ = {PeerState::kDone, PeerState::kLate, PeerState::kWaits, PeerState::kLate};
  EXPECT_EQ(said(14), "");
  states_[1] = PeerState::kWaits;
  EXPECT_THAT(said(2), ::testing::HasSubstr("has waited 15 s for rank 3 (host b) →"));
  EXPECT_EQ(diagnosis_.suspects(op_).job_ranks, std::vector{3});
  states_[2] = PeerState::kAbsent;
  EXPECT_EQ(diagnosis_.suspects(op_).names, "rank 2 (host b)");
}

TEST_F(StallsOfFour, AreSaidByOneWhereSomethingIsWaitedFor) {
  EXPECT_EQ(said(100), "");
  cause_ = "the network";
  EXPECT_THAT(said(100), ::testing::HasSubstr("s for the network →"));
  states_[1] = PeerState::kStarted;
  EXPECT_EQ(said(13, 2), "");
  EXPECT_EQ(said(13, 3), "") << "something has moved";
  EXPECT_THAT(said(3, 3), ::testing::HasSubstr("s for rank 1 "));
  speaks_ = false;
  EXPECT_EQ(said(100, 4), "");
}

TEST_F(StallNotices, OneRankPerHostWarns) {
  const auto first = std::make_unique<RankControlBlock>();
  EXPECT_TRUE(claim_stall_warning(*first, 7, 1));
  EXPECT_FALSE(claim_stall_warning(*first, 7, 1));
  EXPECT_TRUE(claim_stall_warning(*first, 7, 2));
  EXPECT_FALSE(claim_stall_warning(*first, 7, 1));
  EXPECT_TRUE(claim_stall_warning(*first, 8, 1));
}

TEST_F(StallNotices, NameTheFirstFew) {
  EXPECT_EQ(first_names({"a", "b"}), "a; b");
  EXPECT_EQ(first_names(std::vector<std::string>(11, "x")), "x; x; x; x; x; x; x; x; 3 more");
}

}  // namespace
}  // namespace lockstep::comm
