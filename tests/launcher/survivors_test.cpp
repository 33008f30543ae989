// When a job continues with the ranks that have outlived others, and when it ends.
#include "launcher/survivors.h"

#include <gtest/gtest.h>

#include <csignal>

namespace lockstep::launcher {
namespace {

using Kind = StatusReport::Kind;
using Outlook = Survivors::Outlook;

struct Job {
  explicit Job(int ranks) : survivors(ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      reports.push_back({});
      reports.back().rank = rank;
      survivors.add(rank, {.kind = Kind::kRejoins});
    }
  }
  void strand(int rank, std::int64_t step) { survivors.add(rank, {.kind = Kind::kStranded, .step = step}); }
  void end(int rank, ExitStatus::How how, int value) {
    reports[static_cast<std::size_t>(rank)].exit_status = ExitStatus{how, value};
  }
  void kill(int rank) { end(rank, ExitStatus::How::kSignalled, SIGKILL); }
  Outlook outlook() const { return survivors.outlook(reports); }

  Survivors survivors;
  std::vector<RankReport> reports;
};

TEST(SurvivorsTest, AJobContinuesWhenAllHaveEndedOrAreStranded) {
  Job job(3);
  EXPECT_TRUE(job.survivors.may_rejoin());
  EXPECT_EQ(job.outlook(), Outlook::kWaits);
  job.kill(1);
  EXPECT_EQ(job.outlook(), Outlook::kWaits);
  job.strand(0, 7);
  EXPECT_EQ(job.outlook(), Outlook::kWaits);
  job.strand(2, 8);
  EXPECT_EQ(job.outlook(), Outlook::kReady);
  EXPECT_EQ(job.survivors.step(job.reports), 8);
}

TEST(SurvivorsTest, ProgramsThatDoNotSayThatTheyCanAreEnded) {
  Survivors survivors(2);
  EXPECT_FALSE(survivors.may_rejoin());
  survivors.add(0, {.kind = Kind::kRejoins});
  EXPECT_FALSE(survivors.may_rejoin());
  survivors.add(1, {.kind = Kind::kRejoins});
  EXPECT_TRUE(survivors.may_rejoin());
}

TEST(SurvivorsTest, WhatWouldRepeatOrWasWantedEndsTheJob) {
  for (const int code : {0, 2, 3, 6, 7, 75, 128 + SIGTERM}) {
    Job job(2);
    job.strand(0, 7);
    job.end(1, ExitStatus::How::kExited, code);
    job.reports[1].stop_requested = code == 75;
    EXPECT_EQ(job.outlook(), Outlook::kHopeless) << code;
  }
  for (const int code : {1, 4, 5, 9}) {
    Job job(2);
    job.strand(0, 7);
    job.end(1, ExitStatus::How::kExited, code);
    EXPECT_EQ(job.outlook(), Outlook::kReady) << code;
  }
}

TEST(SurvivorsTest, SomebodyMustHaveAState) {
  Job job(2);
  job.kill(0);
  job.kill(1);
  EXPECT_EQ(job.outlook(), Outlook::kHopeless);

  // The one that has just been started has none, and would look for the other one for ever.
  Job again(2);
  again.kill(0);
  again.strand(1, 7);
  again.survivors.replace({0}, 7);
  again.reports[0] = {};
  again.kill(1);
  EXPECT_EQ(again.outlook(), Outlook::kHopeless);

  Job torn(2);
  torn.kill(0);
  torn.strand(1, -1);
  EXPECT_EQ(torn.outlook(), Outlook::kHopeless);
}

// A rank that is killed when it is stranded gives nothing.
TEST(SurvivorsTest, ALostRanksStateDoesNotCount) {
  Job job(3);
  job.strand(0, 9);
  job.strand(1, 8);
  job.kill(0);
  job.kill(2);
  EXPECT_EQ(job.outlook(), Outlook::kReady);
  EXPECT_EQ(job.survivors.step(job.reports), 8);
}

TEST(SurvivorsTest, TriesWithoutAStepBetweenAreFew) {
  Job job(2);
  int tries = 0;
  for (; job.survivors.may_rejoin(); ++tries) {
    ASSERT_LT(tries, 10);
    job.survivors.replace({1}, 7);
    EXPECT_FALSE(job.survivors.is_first(7));
    EXPECT_TRUE(job.survivors.is_first(8));
    job.survivors.add(0, {.kind = Kind::kProgress, .step = 7});
  }
  EXPECT_EQ(tries, 3);
  EXPECT_LT(job.survivors.patience(), Survivors(2).patience());
  job.survivors.add(0, {.kind = Kind::kProgress, .step = 8});
  EXPECT_TRUE(job.survivors.may_rejoin());
  EXPECT_FALSE(job.survivors.is_first(9));
}

TEST(SurvivorsTest, RanksThatHaveLostEachOtherConnectAgain) {
  Job job(2);
  job.strand(0, 7);
  EXPECT_EQ(job.outlook(), Outlook::kWaits);
  EXPECT_TRUE(job.survivors.is_stranded(0));
  EXPECT_FALSE(job.survivors.is_stranded(1));
  job.strand(1, 7);
  EXPECT_EQ(job.outlook(), Outlook::kReady);
}

TEST(PlaceTest, IsVariablesAndNothingElse) {
  const Place place = {{"RANK", "3"}, {"EMPTY", ""}, {"CAUSE", "a=b c"}};
  EXPECT_EQ(decode_place(encode_place(place)), place);
  EXPECT_EQ(decode_place(""), Place());
  for (const std::string_view bytes : {"RANK=3", "=3\0", "RANK\0"})
    EXPECT_EQ(
        decode_place(
            std::string_view(bytes.data(), bytes.size() + 1).substr(0, bytes == "RANK=3" ? 6 : std::string_view::npos)),
        std::nullopt);
}

}  // namespace
}  // namespace lockstep::launcher
