// lockstep report, compare and watch, of runs that were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Report, OfARunWithAKilledAndRestartedRank) {
  const TemporaryDirectory directory;
  run_well("PATH=$(dirname " FAULTY_PROGRAM
           "):$PATH; lockstep launch -n 2 --max-restarts 1 --log-dir logs -- bash -c \"LOCKSTEP_TEST_FAULT=\\$([ "
           "\\$LOCKSTEP_ATTEMPT = 0 ] && echo crash:1) exec faulty --steps 20 --threads 1 --quiet --checkpoint-dir ck "
           "--checkpoint-every 3 --resume auto --metrics m.jsonl --trace t.json\"",
           directory.path());
  const auto restarts = events_of(directory.path() / "m.jsonl", "restart");
  ASSERT_EQ(restarts.size(), 1u);
  EXPECT_EQ(restarts[0]["attempt"], 1);
  EXPECT_THAT(restarts[0]["cause"].get<std::string>(), HasSubstr("rank 1 of 2"));
  const auto outcome = run_well("lockstep report m.jsonl --trace t.json --log-dir logs", directory.path());
  EXPECT_THAT(outcome.out, HasSubstr("report.html ("));
  const std::string page = read_file(directory.path() / "report.html");
  const auto metrics = read_metrics(directory.path() / "m.jsonl");
  EXPECT_THAT(page, AllOf(HasSubstr("1 restart"), HasSubstr("attempt 1: rank 1 of 2"), HasSubstr("Attempts"),
                          HasSubstr("What ranks did last"), HasSubstr("on all ranks"), HasSubstr("Time of a step"),
                          HasSubstr(metrics.final["params_sha256"].get<std::string>())));
}

// Causes made on purpose. Where other programs disturb the ranks, there may be another one for a moment: then once
// more. (That a run without a cause has none is said by tests/report/bottlenecks_test.cpp: on a busy machine, there is
// one.)
TEST(Report, SaysWhyARunIsSlow) {
  for (const auto& [fault, says] : {std::pair("slow:1:20", "rank 1 [(]host [^)]*[)] computes [0-9]+ % longer"),
                                    std::pair("slow-data:1:2", "the loader is late: rank 1 [(]host")}) {
    std::string page;
    for (int attempt = 0; attempt < 4 && !std::regex_search(page, std::regex(says)); ++attempt) {
      const TemporaryDirectory directory;
      run_well(
          std::string("export LOCKSTEP_TEST_FAULT=") + fault +
              "; PATH=$(dirname " FAULTY_PROGRAM
              "):$PATH; lockstep launch -n 2 -- faulty --steps 81 --threads 1 --batch 64 --quiet --metrics m.jsonl; "
              "lockstep report m.jsonl",
          directory.path());
      page = read_file(directory.path() / "report.html");
    }
    EXPECT_TRUE(std::regex_search(page, std::regex(says))) << fault;
  }
}

TEST(Report, SettingsAndResultsOfTwoRunsAreCompared) {
  const TemporaryDirectory directory;
  const std::string train = "lockstep train mlp --hidden 16 --data digits --threads 1 --device cpu --quiet --epochs 2 ";
  run_well(train + "--metrics a.jsonl", directory.path());
  run_well("LOCKSTEP_LR=0.01 " + train + "--metrics b.jsonl", directory.path());
  EXPECT_THAT(run_well("lockstep compare a.jsonl b.jsonl", directory.path()).out,
              AllOf(HasSubstr("lr "), HasSubstr("validation accuracy"), Not(HasSubstr("hidden "))));
  EXPECT_THAT(run_well("lockstep watch a.jsonl", directory.path()).out,
              AllOf(HasSubstr("mlp on digits"), HasSubstr("training loss"), HasSubstr("\xe2")));
  run_well("lockstep report a.jsonl b.jsonl -o both.html", directory.path());
  EXPECT_THAT(read_file(directory.path() / "both.html"), HasSubstr("b.jsonl: training"));
  EXPECT_THAT(run("lockstep report a.jsonl -o a.jsonl", directory.path()), fails_with(2, "would overwrite a.jsonl"));
  EXPECT_THAT(run("lockstep report a.jsonl b.jsonl --trace t.json", directory.path()), fails_with(2, "--trace"));
  EXPECT_THAT(run("lockstep report none.jsonl", directory.path()), fails_with(3, "none.jsonl"));
  EXPECT_THAT(run("lockstep report", directory.path()), fails_with(2, "needs a RUN"));
  EXPECT_THAT(run("lockstep compare a.jsonl", directory.path()), fails_with(2, "needs a RUN"));
  EXPECT_THAT(run("lockstep compare a.jsonl b.jsonl c.jsonl", directory.path()), fails_with(2, "c.jsonl"));
}

}  // namespace
}  // namespace lockstep::testing
