#include "simulate/plan.h"

#include <gmock/gmock.h>

#include "tests/simulate/example_profile.h"

namespace lockstep::simulate {
namespace {

using ::testing::HasSubstr;

Advice advice(double gbit, int nodes) {
  Cluster cluster;
  cluster.variation.kind = Variation::Kind::kNone;
  cluster.fabric.between = {.bytes_per_s = gbit * 1e9 / 8, .latency_s = 20e-6};
  cluster.algorithm = Algorithm::kRing;
  const std::vector<StepProfile> profiles = {example_profile()};
  return advise(profiles, {}, cluster, nodes, {.trials = 3, .seed = 1});
}

TEST(Plan, CompressionIsWorthItOnASlowLink) {
  const Advice a = advice(1, 4);
  EXPECT_TRUE(a.compression_worth);
  EXPECT_THAT(a.because, HasSubstr("does not hide"));
  EXPECT_LT(a.compressed.front().prediction.step_ms, 0.7 * a.best.prediction.step_ms);
  EXPECT_GT(a.accumulated.job.accumulate, 1);
}

TEST(Plan, NothingIsAdvisedWhereNothingIsGained) {
  const Advice a = advice(10000, 4);
  EXPECT_FALSE(a.compression_worth);
  EXPECT_THAT(a.because, HasSubstr("backward hides"));
}

TEST(Plan, OneRankNeedsNothing) {
  const Advice a = advice(1, 1);
  EXPECT_FALSE(a.compression_worth);
  EXPECT_TRUE(a.compressed.empty());
  EXPECT_FALSE(a.sharded.has_value());
  EXPECT_EQ(flags_of(a.best.job, {}), "");
}

TEST(Plan, SmallerBucketsAreFoundWhereTheyHideMore) {
  // Three of four gradients in one bucket start late.
  const Advice a = advice(8, 2);
  EXPECT_LE(a.best.prediction.step_ms, a.as_asked.prediction.step_ms);
  for (const std::size_t bytes : bucket_sizes()) {
    Cluster cluster;
    cluster.variation.kind = Variation::Kind::kNone;
    cluster.fabric.between = {.bytes_per_s = 1e9, .latency_s = 20e-6};
    cluster.algorithm = Algorithm::kRing;
    const std::vector<StepProfile> profiles = {example_profile()};
    const double ms = simulate_step(profiles, {.bucket_bytes = bytes}, cluster, 2, {.trials = 3, .seed = 1}).step_ms;
    EXPECT_LE(0.99 * a.best.prediction.step_ms, ms);
  }
}

TEST(Plan, FlagsAreWhatDiffers) {
  EXPECT_EQ(flags_of({}, {}), "");
  EXPECT_EQ(flags_of({.bucket_bytes = 4 << 20, .comm_hook = "bf16", .zero = 1, .accumulate = 2}, {}),
            "--bucket-mb 4 --zero 1 --comm-hook bf16 --accumulate 2");
}

}  // namespace
}  // namespace lockstep::simulate
