#include "report/bottlenecks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace lockstep::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<Cause> causes_of(const StepFacts& facts) {
  std::vector<Cause> causes;
  for (const auto& bottleneck : bottlenecks_of(facts)) causes.push_back(bottleneck.cause);
  return causes;
}

StepFacts healthy() {
  return {.step_ms = 100, .ranks = {{"a", 1, 92, 7}, {"a", 2, 94, 4}, {"b", 1, 93, 6}, {"b", 0.5, 93, 6}}};
}

TEST(Bottlenecks, AHealthyRunHasNone) {
  StepFacts facts = healthy();
  facts.larger_batch = {.batch = 32, .larger = 128, .gain = 0.1};
  EXPECT_TRUE(bottlenecks_of(facts).empty());
  EXPECT_THAT(lines_of({}, facts), ::testing::ElementsAre(HasSubstr("nothing holds it up")));
  EXPECT_TRUE(bottlenecks_of({}).empty()) << "nothing was measured";
  EXPECT_TRUE(bottlenecks_of({.step_ms = 10, .ranks = {{"a", 0, 10, 0}}}).empty()) << "one rank";
}

TEST(Bottlenecks, TheLoaderIsNamedWithWhatItCosts) {
  StepFacts facts = healthy();
  facts.ranks[2] = {"b", 40, 58, 2};
  const auto found = bottlenecks_of(facts);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].cause, Cause::kData);
  EXPECT_NEAR(found[0].share, 0.4, 1e-9);
  EXPECT_THAT(found[0].text, AllOf(HasSubstr("rank 2 (host b)"), HasSubstr("40 ms"), HasSubstr("40 %")));
  EXPECT_THAT(found[0].remedy, AllOf(HasSubstr("--workers 2 (now 1)"), HasSubstr("up to 4 % faster")))
      << "the others take 94 ms to compute";
  // On a GPU the host knows no more.
  const double unknown = std::nan("");
  EXPECT_EQ(causes_of({.step_ms = 10, .ranks = {{"a", 4, unknown, 0}, {"a", 3, unknown, 0}}}),
            std::vector{Cause::kData});
}

TEST(Bottlenecks, ASlowRankIsNamedAndTheWaitForItIsNoCommunication) {
  StepFacts facts = {.step_ms = 100, .ranks = {{"a", 1, 60, 39}, {"b", 1, 97, 2}, {"c", 1, 62, 37}}};
  const auto found = bottlenecks_of(facts);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].cause, Cause::kSlowRank);
  EXPECT_THAT(found[0].text,
              AllOf(HasSubstr("rank 1 (host b) computes 59 % longer"), HasSubstr("97 ms per step instead of 61")));
}

TEST(Bottlenecks, CommunicationSaysWhetherTheLinkOrTheBucketsAreToBlame) {
  StepFacts facts = {.step_ms = 100, .ranks = {{"a", 0, 60, 40}, {"b", 0, 60, 40}}};
  EXPECT_THAT(bottlenecks_of(facts).at(0).text, HasSubstr("does not hide 40 ms of communication (40 %)"));
  // 12 MB at 0.15 GB/s are 80 ms, and backward takes 40.
  facts.link = {.bytes = 12e6, .step_gbs = 0.15, .alone_gbs = 0.15, .buckets = 2, .bucket_mb = 10};
  EXPECT_THAT(bottlenecks_of(facts).at(0).text, AllOf(HasSubstr("0.15 GB/s alone"), HasSubstr("longer than backward")));
  EXPECT_THAT(bottlenecks_of(facts).at(0).remedy, AllOf(HasSubstr("--comm-hook bf16"), HasSubstr("up to 67 % faster")));
  facts.link->alone_gbs = 10;
  facts.link->buckets = 1;
  EXPECT_THAT(bottlenecks_of(facts).at(0).text, HasSubstr("it is one bucket"));
  EXPECT_THAT(bottlenecks_of(facts).at(0).remedy, HasSubstr("--bucket-mb 2.5 (now 10)"));
  facts.link->buckets = 5;
  EXPECT_THAT(bottlenecks_of(facts).at(0).remedy, HasSubstr("--bucket-mb auto"));
  facts.exposed_ms = 9;  // what was measured counts, not what ranks wait
  EXPECT_TRUE(bottlenecks_of(facts).empty());
}

TEST(Bottlenecks, ABatchIsSmallOnlyWhereALargerOneWasFaster) {
  StepFacts facts = healthy();
  facts.larger_batch = {.batch = 1, .larger = 4, .gain = 1.5, .share = 0.05};
  const auto found = bottlenecks_of(facts);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].cause, Cause::kSmallBatch);
  EXPECT_THAT(found[0].text, HasSubstr("1 samples of a rank reach 5 %"));
  EXPECT_THAT(found[0].remedy, AllOf(HasSubstr("--batch 4"), HasSubstr("150 %")));
  for (auto& rank : facts.ranks) rank = {"a", 0, 10, 90};
  EXPECT_EQ(causes_of(facts), std::vector{Cause::kCommunication}) << "computation is a tenth of the step";
}

TEST(Bottlenecks, TheCostliestComesFirst) {
  StepFacts facts = {.step_ms = 100, .ranks = {{"a", 12, 48, 40}, {"b", 12, 48, 40}}};
  EXPECT_EQ(causes_of(facts), (std::vector{Cause::kCommunication, Cause::kData}));
}

}  // namespace
}  // namespace lockstep::report
