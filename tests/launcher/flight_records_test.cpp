// Flight records after a failure: what the launcher reports of them, what it keeps, and what `lockstep inspect` shows.
#include "launcher/flight_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <functional>

#include "base/error.h"
#include "launcher/inspect.h"
#include "lockstep/base/env.h"
#include "tests/support/json.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::launcher {
namespace {

using flight::Kind;
using flight::Phase;
using lockstep::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The record of a process that was rank `rank` of `ranks` and did `act`.
void record(const std::string& directory, int rank, int ranks, const std::function<void()>& act) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    set_env(flight::kDirectoryVariable, directory);
    flight::open(rank, ranks);
    act();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
}

flight::RecordedOperation operation(std::uint64_t sequence, bool complete) {
  flight::RecordedOperation made;
  made.sequence = sequence;
  made.bytes = 1000;
  made.step = 12;
  made.kind = Kind::kAllReduce;
  made.group = 1;
  made.number = sequence;
  made.issued_ns = 1'000'000'000;
  made.completed_ns = complete ? 1'100'000'000 : 0;
  return made;
}

/// Of a rank that waits in `sequence` for `missing`, seen after two seconds.
RankFlight waiting(int rank, std::uint64_t sequence, std::vector<int> missing) {
  flight::Snapshot snapshot;
  snapshot.rank = rank;
  snapshot.world_size = 4;
  snapshot.phase = Phase::kBackward;
  snapshot.step = 12;
  snapshot.waits_since = 1'000'000'000;
  snapshot.missing = std::move(missing);
  snapshot.operations = {operation(sequence - 1, true), operation(sequence, false)};
  return {.bytes = "x", .at_ns = 3'000'000'000, .snapshot = snapshot};
}

RankFlight in_forward(int rank) {
  RankFlight flight = waiting(rank, 8, {});
  flight.snapshot->waits_since = 0;
  flight.snapshot->phase = Phase::kForward;
  flight.snapshot->phase_since_ns = 500'000'000;
  flight.snapshot->operations = {operation(7, true)};
  return flight;
}

RootCause cause_of(int rank, int code = 139) {
  RootCause cause;
  cause.exit_code = code;
  cause.rank = rank;
  cause.line = "rank failed";
  return cause;
}

TEST(DescribeFlights, SaysWhereTheCulpritWasAndWhoWaitedForIt) {
  const auto lines = describe_flights({}, cause_of(1), {waiting(0, 8, {1}), in_forward(1), waiting(2, 8, {1})}, {});
  EXPECT_THAT(lines, ElementsAre("rank 1 was in the forward pass of step 12 for 2.5 s; the last operation it issued is "
                                 "allreduce #7 (1.0 kB, step 12), complete",
                                 "ranks 0 and 2 were waiting for rank 1 in allreduce #8 (1.0 kB, step 12) for 2.0 s"));
}

// Ranks that were ended before they had found out whom they wait for.
TEST(DescribeFlights, RanksMissingFromAnOperationAreListed) {
  const auto lines = describe_flights({}, cause_of(1), {waiting(0, 8, {}), in_forward(1)}, {});
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[1], HasSubstr("rank 0 was waiting for rank 1 in allreduce #8"));
  // It has come to this one.
  RankFlight there = in_forward(1);
  there.snapshot->operations.push_back(operation(8, false));
  EXPECT_THAT(describe_flights({}, cause_of(1), {waiting(0, 8, {}), there}, {})[1],
              HasSubstr("rank 0 was waiting in allreduce #8"));
}

TEST(DescribeFlights, RanksInDifferentOperationsAreDistinguished) {
  const auto lines =
      describe_flights({}, cause_of(1, 5), {waiting(0, 8, {2}), waiting(1, 7, {0}), waiting(2, 8, {2})}, {});
  EXPECT_THAT(lines, ElementsAre(HasSubstr("rank 1 was waiting in allreduce #7 (1.0 kB, step 12) for 2.0 s for rank 0"),
                                 HasSubstr("ranks 0 and 2 were waiting for rank 2 in allreduce #8")));
}

TEST(DescribeFlights, ManyGroupsOfRanksAreCounted) {
  std::vector<RankFlight> flights;
  for (int rank = 0; rank < 9; ++rank) flights.push_back(waiting(rank, static_cast<std::uint64_t>(rank) + 2, {}));
  EXPECT_EQ(describe_flights({}, cause_of(0), flights, {}).size(), 1u + 4u + 1u);
}

TEST(DescribeFlights, ABacktraceIsShownOnce) {
  RankFlight crashed = in_forward(1);
  crashed.snapshot->signal = SIGSEGV;
  crashed.snapshot->backtrace = {"f(+0x1)", "g(+0x2)"};
  EXPECT_THAT(describe_flights({}, cause_of(1), {{}, crashed}, {"a line"}),
              ElementsAre(HasSubstr("forward"), "rank 1 crashed by SIGSEGV in:", "  | f(+0x1)", "  | g(+0x2)"));
  EXPECT_THAT(describe_flights({}, cause_of(1), {{}, crashed}, {"crashed by SIGSEGV, in:"}),
              ElementsAre(HasSubstr("forward")));
}

TEST(DescribeFlights, NothingToReport) {
  EXPECT_THAT(describe_flights({}, cause_of(1), {{}, {}}, {}), IsEmpty());
  EXPECT_THAT(describe_flights({}, cause_of(7), {waiting(0, 8, {})}, {}), ElementsAre(HasSubstr("rank 0 was waiting")));
  RankFlight starting = in_forward(0);
  starting.snapshot->phase = Phase::kStarting;
  starting.snapshot->step = 0;
  EXPECT_THAT(describe_flights({}, cause_of(0), {starting}, {}), IsEmpty()) << "a program that has only begun";
  starting.snapshot->phase = Phase::kRunning;
  EXPECT_THAT(describe_flights({}, cause_of(0), {starting}, {}), ElementsAre(HasSubstr("rank 0 was running for ")));
  EXPECT_THAT(describe_flights({}, cause_of(0, 3), {starting}, {}), IsEmpty()) << "its data are not there";
  JobReport interrupted;
  interrupted.interrupted_by = SIGINT;
  EXPECT_THAT(describe_flights(interrupted, cause_of(1), {waiting(0, 8, {1}), in_forward(1)}, {}), IsEmpty());
  EXPECT_THAT(describe_flights({}, cause_of(1, 75), {waiting(0, 8, {1}), in_forward(1)}, {}), IsEmpty());
  EXPECT_THAT(describe_flights({}, {}, {waiting(0, 8, {1})}, {}), IsEmpty());
}

TEST(GatherFlights, ReadsUnsentRecordsOfThisJobAlone) {
  const TemporaryDirectory directory;
  const std::string place = directory.path() / "flight";
  record(place, 0, 3, [] { flight::set_step(1); });
  record(place, 1, 2, [] { flight::set_step(2); });  // of a job of two
  std::ofstream(flight::path_of(place, 2)) << "nothing";
  std::vector<RankReport> ranks(3);
  ranks[0].lost = true;
  ranks[0].ended_at = Clock::time_point(std::chrono::seconds(5));
  std::vector<RankFlight> flights;
  gather_flights(ranks, place, flights);
  ASSERT_EQ(flights.size(), 3u);
  ASSERT_TRUE(flights[0].snapshot);
  EXPECT_EQ(flights[0].snapshot->step, 1);
  EXPECT_EQ(flights[0].at_ns, 5'000'000'000);
  EXPECT_FALSE(flights[1].snapshot);
  EXPECT_FALSE(flights[2].snapshot);
  EXPECT_EQ(flights[1].bytes + flights[2].bytes, "");
  // What has been sent counts.
  std::vector<RankFlight> sent(3);
  sent[0] = {.bytes = flights[0].bytes, .at_ns = 7};
  sent[1] = {.bytes = "garbage"};
  gather_flights(ranks, "", sent);
  EXPECT_EQ(sent[0].at_ns, 7);
  EXPECT_TRUE(sent[0].snapshot);
  EXPECT_EQ(sent[1].bytes, "");
}

TEST(KeepFlights, InTheDirectoryOfLogs) {
  const TemporaryDirectory directory;
  const std::string place = directory.path() / "here", logs = directory.path() / "logs";
  std::filesystem::create_directory(logs);
  record(place, 1, 2, [] { flight::set_step(9); });
  std::vector<RankFlight> flights;
  gather_flights(std::vector<RankReport>(2), place, flights);
  EXPECT_EQ(keep_flights(flights, logs), "");
  EXPECT_THAT(records_at(logs), ElementsAre(logs + "/flight/rank-1"));
  EXPECT_EQ(flight::read(logs + "/flight", 1)->step, 9);
  remove_flights(logs);
  EXPECT_THROW(records_at(logs), IoError);
  EXPECT_EQ(keep_flights(std::vector<RankFlight>(2), logs + "/nowhere"), "") << "there is nothing to keep";
  EXPECT_THAT(keep_flights(flights, logs + "/nowhere"), HasSubstr("are not kept in"));
  remove_flights(logs + "/nowhere");
}

class Inspect : public ::testing::Test {
 protected:
  void SetUp() override {
    record(place_, 2, 4, [] {
      flight::set_step(3);
      flight::set_phase(Phase::kForward);
      for (std::uint64_t i = 1; i <= 30; ++i)
        flight::complete(flight::issue({.sequence = i, .bytes = 8 * i, .kind = Kind::kBroadcast, .group = 1}));
      flight::issue({.sequence = 1, .bytes = 64, .step = 3, .bucket = 0, .kind = Kind::kAllReduce, .group = 2});
      flight::issue({.sequence = 0, .bytes = 64, .kind = Kind::kAllGather, .group = 1});
    });
    snapshot_ = flight::read(place_, 2).value();
  }
  TemporaryDirectory directory_;
  std::string place_ = directory_.path() / "flight";
  flight::Snapshot snapshot_;
};

TEST_F(Inspect, ATablePerRank) {
  const std::string text = text_of(snapshot_, 4);
  EXPECT_THAT(text, AllOf(HasSubstr("rank 2 of 4 (host "), HasSubstr("in the forward pass of step 3 since "),
                          HasSubstr("the last 4 of 32 operations:")));
  EXPECT_THAT(text, AllOf(HasSubstr("broadcast #29"), HasSubstr("broadcast #30"), HasSubstr("allreduce #1 of group 2"),
                          HasSubstr("(the group's own)"), ::testing::Not(HasSubstr("broadcast #28"))));
  EXPECT_THAT(text_of(snapshot_, 0), ::testing::Not(HasSubstr("operations:")));
  EXPECT_THAT(text_of({}, 4), HasSubstr("no operation"));
}

TEST_F(Inspect, JsonHasTheSame) {
  const auto json = nlohmann::json::parse(json_of(snapshot_, 3));
  EXPECT_EQ(json["rank"], 2);
  EXPECT_EQ(json["world_size"], 4);
  EXPECT_EQ(json["phase"], "forward");
  EXPECT_EQ(json["step"], 3);
  EXPECT_TRUE(json["signal"].is_null());
  EXPECT_EQ(json["operations_issued"], 32);
  ASSERT_EQ(json["operations"].size(), 3u);
  EXPECT_GE(json["operations"][0]["took_ms"].get<double>(), 0);
  EXPECT_TRUE(json["operations"][0]["bucket"].is_null());
  EXPECT_TRUE(json["operations"][1]["took_ms"].is_null());
  EXPECT_EQ(json["operations"][1]["bucket"], 0);
  EXPECT_EQ(json["operations"][1]["kind"], "allreduce");
}

TEST_F(Inspect, FindsRecordsByTheirNames) {
  record(place_, 10, 11, [] {});
  std::ofstream(directory_.path() / "rank-2.log") << "a log";
  std::ofstream(directory_.path() / "flight" / "rank--1") << "";
  EXPECT_THAT(records_at(directory_.path()), ElementsAre(place_ + "/rank-2", place_ + "/rank-10"));
  EXPECT_THAT(records_at(place_ + "/rank-2"), ElementsAre(place_ + "/rank-2"));
  EXPECT_THAT(records_at("/nowhere"), ElementsAre("/nowhere")) << "reading it says what is wrong";
}

}  // namespace
}  // namespace lockstep::launcher
