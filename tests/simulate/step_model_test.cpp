#include "simulate/step_model.h"

#include <gmock/gmock.h>

#include <random>

#include "tests/simulate/example_profile.h"

namespace lockstep::simulate {
namespace {

constexpr std::size_t kMib = 1 << 20;

Cluster steady(double gbit, double usec) {
  Cluster cluster;
  cluster.variation.kind = Variation::Kind::kNone;
  cluster.fabric.between = {.bytes_per_s = gbit * 1e9 / 8, .latency_s = usec * 1e-6};
  cluster.algorithm = Algorithm::kRing;
  return cluster;
}

Prediction predict(const Job& job, const Cluster& cluster, int nodes, StepProfile profile = example_profile()) {
  const std::vector<StepProfile> profiles = {std::move(profile)};
  return simulate_step(profiles, job, cluster, nodes, {.trials = 200, .seed = 1});
}

TEST(StepModel, OneRankIsWhatWasMeasured) {
  const Prediction p = predict({}, steady(10, 10), 1);
  EXPECT_DOUBLE_EQ(p.step_ms, 110);
  EXPECT_DOUBLE_EQ(p.compute_ms, 110);
  EXPECT_DOUBLE_EQ(p.efficiency, 1);
  EXPECT_DOUBLE_EQ(p.samples_per_s, 8 / 0.110);
  EXPECT_NEAR(p.exposed_ms, 0, 1e-9);
  EXPECT_EQ(p.limit, "computation");
}

// Four that were measured beside each other, of which each step had waited for the slowest: no other is drawn.
TEST(StepModel, RanksBesideEachOtherAreSlowestOnce) {
  StepProfile profile = example_profile();
  profile.step_ms = {100, 105, 110, 120, 200};
  profile.ranks = 4;
  Cluster cluster = steady(1e6, 0);
  cluster.variation.kind = Variation::Kind::kMeasured;
  cluster.fabric.ranks_per_node = 4;
  const Prediction four = predict({}, cluster, 1, profile);
  EXPECT_NEAR(four.step_ms, 110, 1);
  EXPECT_GT(predict({}, cluster, 8, profile).step_ms, 119);  // of eight such hosts one is slower
  profile.ranks = 1;
  EXPECT_GT(predict({}, cluster, 1, profile).step_ms, four.step_ms + 5);
}

// A bucket per gradient, 4 ms each on the wire: they are ready every 8 ms, so that all but the last one are hidden.
// That one is ready at 92 ms, and there at 96.
TEST(StepModel, FastLinksAreHiddenBehindBackward) {
  const double bytes = 4.0 * kMib;
  Cluster cluster = steady(1, 0);
  cluster.fabric.between.bytes_per_s = bytes / 4e-3;  // two nodes: each sends 2 · 1/2 of them
  const Prediction p = predict({.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib}, cluster, 2);
  EXPECT_EQ(p.buckets, 10u);
  EXPECT_NEAR(p.communication_ms, 40, 1e-9);
  EXPECT_NEAR(p.step_ms, 110, 1e-9);
  EXPECT_NEAR(p.exposed_ms, 0, 1e-9);
}

// 12 ms each: the first starts at 20 ms, then the wire is never idle until 140 ms; the last one's update follows, 1 ms.
TEST(StepModel, SlowLinksAreALineOfBuckets) {
  Cluster cluster = steady(1, 0);
  cluster.fabric.between.bytes_per_s = 4.0 * kMib / 12e-3;
  const Prediction p = predict({.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib}, cluster, 2);
  EXPECT_NEAR(p.step_ms, 141, 1e-9);
  EXPECT_NEAR(p.exposed_ms, 31, 1e-9);
  EXPECT_EQ(p.limit, "bandwidth between nodes");
  // One bucket of all starts when the last gradient is ready, and hides nothing: 92 + 120 + 10.
  EXPECT_NEAR(predict({.bucket_bytes = 64 * kMib, .first_bucket_bytes = 64 * kMib}, cluster, 2).step_ms, 222, 1e-9);
}

TEST(StepModel, AThreadThatMovesBytesComputesLater) {
  Cluster cluster;
  cluster.variation.kind = Variation::Kind::kNone;
  cluster.algorithm = Algorithm::kDirect;
  cluster.fabric = {.ranks_per_node = 2, .inside = {.bytes_per_s = 4.0 * kMib / 3e-3, .latency_s = 0}};
  cluster.fabric.thread_bytes_per_s = 1e9;
  // 3 ms for each of ten buckets, all of the thread's time.
  EXPECT_NEAR(predict({.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib}, cluster, 1).step_ms, 140, 1e-6);
}

TEST(StepModel, ZeroUpdatesAShareAndGathersDuringForward) {
  Cluster cluster = steady(1, 0);
  cluster.fabric.between.bytes_per_s = 4.0 * kMib / 4e-3;
  const Job job = {.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib, .zero = 1};
  // All-gathers take 20 ms, as long as forward; updates half of 10.
  EXPECT_NEAR(predict(job, cluster, 2).step_ms, 105, 1e-6);
  cluster.fabric.between.bytes_per_s /= 2;
  EXPECT_NEAR(predict(job, cluster, 2).step_ms, 125, 1e-6);
}

TEST(StepModel, PartsOfAStepShareItsCommunication) {
  Cluster cluster = steady(1, 0);
  cluster.fabric.between.bytes_per_s = 4.0 * kMib / 12e-3;
  const Prediction once = predict({.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib}, cluster, 2);
  const Prediction thrice =
      predict({.bucket_bytes = 4 * kMib, .first_bucket_bytes = 4 * kMib, .accumulate = 3}, cluster, 2);
  EXPECT_NEAR(thrice.step_ms, once.step_ms + 200, 1e-6);
  EXPECT_GT(thrice.samples_per_s, once.samples_per_s);
  EXPECT_NEAR(thrice.compute_ms, 310, 1e-6);
}

TEST(StepModel, TheSlowestOfMoreRanksIsSlower) {
  Cluster cluster = steady(1000, 0);
  cluster.variation = {.kind = Variation::Kind::kNormal, .sigma = 0.05};
  double before = 0;
  for (const int nodes : {1, 4, 64, 1024, 16384}) {
    const Prediction p = predict({}, cluster, nodes);
    EXPECT_GT(p.step_ms, before) << nodes;
    before = p.step_ms;
  }
  // The expected largest of 16,384 is 3.9 standard deviations above the mean.
  EXPECT_NEAR(before / 110, 1 + 3.9 * 0.05, 0.02);
  cluster.variation = {.kind = Variation::Kind::kNone, .slow_share = 0.01, .slow_factor = 2};
  EXPECT_NEAR(predict({}, cluster, 1024).step_ms, 2 * 110, 10);
  EXPECT_EQ(predict({}, cluster, 1024).limit, "the slowest rank");
}

TEST(StepModel, MeasuredVariationIsTheProfiles) {
  Cluster cluster = steady(1000, 0);
  cluster.variation.kind = Variation::Kind::kMeasured;
  EXPECT_NEAR(predict({}, cluster, 4096).step_ms, 121, 1);  // every step has a rank at the longest
  EXPECT_NEAR(predict({}, cluster, 1).step_ms, 110, 1e-9);
}

TEST(StepModel, DataThatIsLateIsTheLimit) {
  const Prediction p = predict({.data_ms = 300}, steady(100, 1), 2);
  EXPECT_DOUBLE_EQ(p.step_ms, 300);
  EXPECT_EQ(p.limit, "data");
}

TEST(StepModel, TheNearestProfileCounts) {
  StepProfile two = example_profile();
  two.ranks = 2;
  two.backward_ms = 130;
  const std::vector<StepProfile> profiles = {example_profile(), two};
  EXPECT_EQ(&profile_for(profiles, 1), &profiles[0]);
  EXPECT_EQ(&profile_for(profiles, 2), &profiles[1]);
  EXPECT_EQ(&profile_for(profiles, 8), &profiles[1]);
  Cluster cluster = steady(1e6, 0);
  cluster.fabric.ranks_per_node = 2;
  cluster.fabric.inside.bytes_per_s = 1e15;
  const Prediction p = simulate_step(profiles, {}, cluster, 1, {.trials = 5, .seed = 1});
  EXPECT_NEAR(p.step_ms, 140, 0.01);
  EXPECT_NEAR(p.compute_ms, 110, 1e-9);  // of one rank alone: sharing a host counts as loss
}

// Whatever the cluster: better parts make no step longer, a step is never shorter than its computation, and what is
// exposed is no more than all of it.
TEST(StepModel, BetterPartsNeverMakeStepsLonger) {
  std::mt19937 random(7);
  const auto between = [&](double low, double high) {
    return low * std::pow(high / low, std::uniform_real_distribution<>(0, 1)(random));
  };
  for (int i = 0; i < 500; ++i) {
    Cluster cluster = steady(between(0.1, 1000), between(0.1, 1000));
    cluster.fabric.ranks_per_node = 1 + static_cast<int>(random() % 8);
    cluster.fabric.inside = {.bytes_per_s = between(1e8, 1e12), .latency_s = between(1e-7, 1e-4)};
    cluster.algorithm = algorithms()[random() % algorithms().size()];
    cluster.fabric.thread_bytes_per_s = random() % 2 == 0 ? 0 : between(1e8, 1e11);
    cluster.contention = random() % 2 == 0 ? 0 : 0.2;
    const int nodes = 1 + static_cast<int>(random() % 64);
    Job job;
    job.bucket_bytes = static_cast<std::size_t>(between(1e5, 1e8));
    job.zero = static_cast<int>(random() % 2);
    const Prediction p = predict(job, cluster, nodes);
    const double updates = job.zero > 0 ? 10.0 / p.ranks : 10.0;
    EXPECT_GE(p.step_ms, 100 + updates - 1e-6);
    EXPECT_LE(p.exposed_ms, (1 + cluster.contention) * p.communication_ms + 1e-6) << i;
    Cluster better = cluster;
    better.fabric.between.bytes_per_s *= 2;
    EXPECT_LE(predict(job, better, nodes).step_ms, p.step_ms + 1e-6) << i;
    better = cluster;
    better.fabric.inside.latency_s /= 2;
    EXPECT_LE(predict(job, better, nodes).step_ms, p.step_ms + 1e-6) << i;
  }
}

}  // namespace
}  // namespace lockstep::simulate
