#include "report/trace.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace lockstep::report {
namespace {

std::string span(int rank, int row, const std::string& name, double begin_us, double took_us, int step) {
  return fmt::format(R"({{"name":"{}","pid":{},"tid":{},"ts":{:.3f},"ph":"X","dur":{:.3f},"args":{{"step":{}}}}},)"
                     "\n",
                     name, rank, row, begin_us, took_us, step);
}

/// A step of 10 ms on a rank, from `begin_us`; of its collective of 4 ms `waited` are waited for.
std::string step_of(int rank, int step, double begin_us, double waited_us) {
  return span(rank, 1, "data", begin_us - 1000, 1000, step) + span(rank, 0, "step", begin_us, 9000, step) +
         span(rank, 1, "fc1 linear", begin_us, 2000, step) +
         span(rank, 1, "fc1 linear backward", begin_us + 2000, 3000, step) +
         span(rank, 1000, "allreduce", begin_us + 5000 + waited_us - 4000, 4000, step) +
         span(rank, 1, "wait for bucket", begin_us + 5000, waited_us, step) +
         span(rank, 1, "optimizer", begin_us + 7000, 1000, step);
}

const std::string kBegin =
    "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[{\"name\":\"lockstep\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{}},"
    "\n"
    "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{\"name\":\"rank 0 (host a)\"}},\n";

TEST(Trace, TimesOfPhasesAndWhatIsHidden) {
  std::string text = kBegin;
  for (int step = 1; step <= 3; ++step)
    for (int rank = 0; rank < 2; ++rank) text += step_of(rank, step, 20'000 * step, rank == 0 ? 1000 : 2000);
  const Trace trace = parse_trace(text + "]}\n", "t.json");
  EXPECT_EQ(trace.ranks[0], "rank 0 (host a)");
  ASSERT_EQ(trace.steps.size(), 6u);
  const auto means = mean_phases(trace);
  ASSERT_EQ(means.size(), 2u);
  const auto at = [&](int rank, Phase phase) {
    return means[static_cast<std::size_t>(rank)][static_cast<std::size_t>(phase)];
  };
  EXPECT_NEAR(at(0, Phase::kData), 1, 1e-9);
  EXPECT_NEAR(at(0, Phase::kForward), 2, 1e-9);
  EXPECT_NEAR(at(0, Phase::kBackward), 3, 1e-9);
  EXPECT_NEAR(at(0, Phase::kOptimizer), 1, 1e-9);
  EXPECT_NEAR(at(0, Phase::kWait), 1, 1e-9);
  EXPECT_NEAR(at(0, Phase::kOther), 2, 1e-9);
  EXPECT_NEAR(at(1, Phase::kWait), 2, 1e-9);
  const auto typical = typical_step(trace);
  ASSERT_EQ(typical.size(), 2u);
  EXPECT_EQ(typical[0]->step, 2);
  const Overlap overlap = overlap_of(*typical[1]);
  EXPECT_NEAR(overlap.collectives_ms, 4, 1e-9);
  EXPECT_NEAR(overlap.hidden_ms, 2, 1e-9);
}

TEST(Trace, WhatLiesWithinAnotherSpanCountsOnce) {
  const Trace trace = parse_trace(kBegin + span(0, 0, "step", 0, 10'000, 1) + span(0, 1, "a backward", 0, 8000, 1) +
                                      span(0, 1, "optimizer", 1000, 3000, 1) + "]}\n",
                                  "t.json");
  const auto means = mean_phases(trace).front();
  EXPECT_NEAR(means[static_cast<std::size_t>(Phase::kBackward)], 5, 1e-9);
  EXPECT_NEAR(means[static_cast<std::size_t>(Phase::kOptimizer)], 3, 1e-9);
  EXPECT_NEAR(means[static_cast<std::size_t>(Phase::kOther)], 2, 1e-9);
}

TEST(Trace, OthersAreRefused) {
  for (const std::string& text :
       {std::string("[]"), std::string(), kBegin + "]}", kBegin + span(-1, 0, "step", 0, 1, 1)})
    EXPECT_THROW(parse_trace(text, "t.json"), IoError) << text;
}

}  // namespace
}  // namespace lockstep::report
