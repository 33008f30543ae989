#include "simulate/step_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"
#include "base/splitmix.h"
#include "base/statistics.h"
#include "base/text.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::simulate {
namespace {

constexpr double kLeastFactor = 0.5;
constexpr std::size_t kBucketBytesBetweenHosts = std::size_t{4} << 20;  // preferred_bucket_bytes() there, on CPUs

/// Of a standard normal distribution, by bisection on erfc.
double normal_quantile(double u) {
  double low = -40, high = 40;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::numbers::sqrt2) < u ? low : high) = middle;
  }
  return low;
}

/// The factor below which a share `u` of all ranks' computation lies.
double factor_at(const Variation& variation, const std::vector<double>& measured, double u) {
  switch (variation.kind) {
    case Variation::Kind::kNone: return 1;
    case Variation::Kind::kMeasured:
      return measured[static_cast<std::size_t>(u * static_cast<double>(measured.size()))];
    case Variation::Kind::kNormal: return std::max(kLeastFactor, 1 + variation.sigma * normal_quantile(u));
    case Variation::Kind::kLogNormal: return std::exp(variation.sigma * normal_quantile(u));
  }
  return 1;
}

/// The largest factors of `ranks` ranks, by trial.
std::vector<double> largest_factors(const Variation& variation, const std::vector<double>& measured, int ranks,
                                    const TrialOptions& options) {
  SplitMix64 random(mix64(options.seed, 0x51u));
  const auto uniform = [&] { return (static_cast<double>(random.next() >> 11) + 0.5) * 0x1p-53; };
  std::vector<double> factors;
  for (int i = 0; i < options.trials; ++i) {
    const double u = std::pow(uniform(), 1.0 / ranks), chance = uniform();
    const double factor = factor_at(variation, measured, std::min(u, std::nextafter(1.0, 0.0)));
    const bool slow = chance < 1 - std::pow(1 - variation.slow_share, ranks);
    factors.push_back(slow ? factor * variation.slow_factor : factor);
  }
  return factors;
}

/// What a hook makes of a bucket.
struct Payload {
  double bytes = 0;    // as an allreduce's
  double local_s = 0;  // of the rank, half of it before and half of it after the collective
};

Payload payload_of(const ddp::Bucket& bucket, std::span<const ddp::SlotSpec> slots, const std::string& hook, int ranks,
                   double copy_rate) {
  const auto bytes = static_cast<double>(bucket.bytes), elements = bytes / static_cast<double>(size_of(bucket.dtype));
  if (hook == "none" || ranks == 1) return {bytes, 0};
  const auto colon = hook.find(':');
  const std::string name = hook.substr(0, colon);
  const double argument = colon == std::string::npos ? 1 : parse_double(hook.substr(colon + 1)).value_or(1);
  const auto passes = [&](double moved) { return copy_rate > 0 ? moved / copy_rate : 0; };
  if (name == "bf16" || name == "fp16") return {bytes / 2, passes(12 * elements)};
  if (name == "topk") return {elements * argument / 100 * 8 * ranks / 2, passes(16 * elements)};
  LOCKSTEP_ASSERT(name == "powersgd", "no cost of the hook {}", hook);
  Payload payload;
  for (const std::size_t slot : bucket.slots) {
    const auto& spec = slots[slot];
    const auto count = static_cast<double>(spec.count), rows = static_cast<double>(spec.rows);
    const double small = argument * (rows + count / rows);
    const bool compressed = spec.rows > 1 && count > 2 * small;
    payload.bytes += 4 * (compressed ? small : count);
    if (compressed) payload.local_s += passes(16 * count);
  }
  return payload;
}

/// One way of a model to train, ready to be run with many factors.
class Model {
 public:
  Model(const StepProfile& profile, const Job& job, const Cluster& cluster, int nodes)
      : job_(job),
        contention_(cluster.contention),
        inline_(cluster.fabric.thread_bytes_per_s > 0),
        costs_(fabric_of(cluster, profile), nodes, cluster.algorithm, cluster.measured) {
    std::vector<ddp::SlotSpec> slots;
    for (const auto& each : profile.gradients) slots.push_back(each.slot);
    ddp::BucketLimits limits;
    if (job.first_bucket_bytes) limits.first_bucket_bytes = *job.first_bucket_bytes;
    if (inline_ && nodes > 1) limits.bucket_bytes = kBucketBytesBetweenHosts;
    if (job.bucket_bytes) limits.bucket_bytes = *job.bucket_bytes;
    limits.slot_alignment = profile.arena_alignment;
    if (job.zero > 0) limits.bucket_multiple = 64 * static_cast<std::size_t>(costs_.ranks());
    const ddp::BucketPlan plan = ddp::plan_buckets(slots, profile.ready_order(), limits);
    double all = 0;
    for (const auto& bucket : plan.buckets) all += static_cast<double>(bucket.bytes);
    const double before_s = 1e-3 * (job.accumulate - 1) * profile.backward_ms;
    for (const auto& bucket : plan.buckets) {
      Stage& stage = stages_.emplace_back();
      for (const std::size_t slot : bucket.slots)
        stage.ready_s = std::max(stage.ready_s, 1e-3 * profile.gradients[slot].ready_ms);
      stage.ready_s += before_s;
      const Payload payload = payload_of(bucket, slots, job.comm_hook, costs_.ranks(), profile.copy_bytes_per_s);
      stage.local_s = payload.local_s;
      stage.update_s = 1e-3 * profile.update_ms * static_cast<double>(bucket.bytes) / all;
      stage.cost = costs_.allreduce(payload.bytes);
      bytes_sent_ += ddp::bytes_sent_by_all_reduce(payload.bytes, costs_.ranks());
      if (job.zero > 0) {
        stage.cost = costs_.reduce_scatter(payload.bytes);
        stage.update_s /= costs_.ranks();
        const Cost gather = costs_.all_gather(static_cast<double>(bucket.bytes));
        gather_.seconds += gather.seconds;
        gather_.thread_s += gather.thread_s;
      }
      communication_s_ += stage.cost.seconds;
    }
    communication_s_ += gather_.seconds;
    backward_s_ = before_s + 1e-3 * profile.backward_ms;
    for (const auto& each : profile.gradients) forward_s_ = std::min(forward_s_, 1e-3 * each.ready_ms);
  }

  /// Seconds of a step whose slowest rank computes `factor` times as long as the profile's.
  double step(double factor, bool communicates) const {
    double shift = 0, engine_free = 0, ended = 0;  // what communication has added to computing; the engine, the update
    const double backward = factor * backward_s_;
    struct Sum {
      double there;
      const Stage* stage;
    };
    if (!communicates) {
      double updates = 0;
      for (const Stage& stage : stages_) updates += stage.update_s;
      return std::max(backward + factor * updates, 1e-3 * job_.data_ms);
    }
    if (job_.zero > 0) {
      const double exposed = inline_ ? gather_.seconds : std::max(0.0, gather_.seconds - factor * forward_s_);
      shift = exposed + (inline_ ? 0 : contention_ * std::min(gather_.seconds, factor * forward_s_));
    }
    // Collectives that start while backward runs.
    std::size_t next = 0;
    std::vector<Sum> sums;
    for (; next < stages_.size(); ++next) {
      const Stage& stage = stages_[next];
      shift += stage.local_s / 2;
      const double ready = factor * stage.ready_s + shift;
      const double start = std::max(ready, engine_free);
      if (start >= backward + shift) {
        shift -= stage.local_s / 2;
        break;
      }
      shift += inline_ ? stage.cost.thread_s : contention_ * std::min(stage.cost.seconds, backward + shift - start);
      engine_free = start + stage.cost.seconds;
      sums.push_back({engine_free, &stage});
    }
    ended = backward + shift;
    // What waits for backward's end: the thread compresses, waits, moves bytes and updates in turn.
    for (const Sum& sum : sums)
      ended = std::max(ended, sum.there) + sum.stage->local_s / 2 + factor * sum.stage->update_s;
    for (std::size_t i = next; i < stages_.size(); ++i) ended += stages_[i].local_s / 2;
    double there = std::max(engine_free, backward + shift);
    for (; next < stages_.size(); ++next) {
      const Stage& stage = stages_[next];
      there += stage.cost.seconds;
      if (inline_) there = std::max(there, ended + stage.cost.thread_s);
      ended = std::max(ended, there) + stage.local_s / 2 + factor * stage.update_s;
    }
    return std::max(ended, 1e-3 * job_.data_ms);
  }

  const CollectiveCosts& costs() const { return costs_; }
  double communication_s() const { return communication_s_; }
  double bytes_sent() const { return bytes_sent_; }
  std::size_t buckets() const { return stages_.size(); }

 private:
  static Fabric fabric_of(const Cluster& cluster, const StepProfile& profile) {
    Fabric fabric = cluster.fabric;
    if (profile.cores > 0)
      fabric.threads_per_core = std::max(1.0, static_cast<double>(profile.ranks) * profile.threads / profile.cores);
    return fabric;
  }

  struct Stage {
    double ready_s = 0, local_s = 0, update_s = 0;
    Cost cost;
  };
  const Job& job_;
  double contention_;
  bool inline_;
  CollectiveCosts costs_;
  std::vector<Stage> stages_;
  Cost gather_;  // of all buckets' parameters
  double backward_s_ = 0, forward_s_ = std::numeric_limits<double>::infinity();
  double communication_s_ = 0, bytes_sent_ = 0;
};

double median_step(const Model& model, const std::vector<double>& factors, bool communicates) {
  std::vector<double> steps;
  for (const double factor : factors) steps.push_back(model.step(factor, communicates));
  return median(std::move(steps));
}

}  // namespace

const StepProfile& profile_for(std::span<const StepProfile> profiles, int ranks_per_node) {
  return *std::ranges::min_element(profiles, {}, [&](const StepProfile& p) {
    return std::abs(std::log(static_cast<double>(p.ranks) / ranks_per_node));
  });
}

Prediction simulate_step(std::span<const StepProfile> profiles, const Job& job, const Cluster& cluster, int nodes,
                         const TrialOptions& options) {
  const StepProfile& profile = profile_for(profiles, cluster.fabric.ranks_per_node);
  std::vector<double> measured = profile.step_ms;
  const double middle = median(measured);
  for (double& ms : measured) ms /= middle;
  std::ranges::sort(measured);
  const Model model(profile, job, cluster, nodes);
  const int ranks = model.costs().ranks();
  // What was measured of several ranks is the slowest one's already.
  const int beside = cluster.variation.kind == Variation::Kind::kMeasured ? profile.ranks : 1;
  const auto factors = largest_factors(cluster.variation, measured, std::max(1, ranks / beside), options);
  std::vector<double> steps, exposed;
  for (const double factor : factors) {
    steps.push_back(1e3 * model.step(factor, true));
    exposed.push_back(steps.back() - 1e3 * model.step(factor, false));
  }
  Prediction p;
  p.nodes = nodes;
  p.ranks = ranks;
  p.step_ms = median(steps);
  p.step_ms_p10 = quantile(steps, 0.1);
  p.step_ms_p90 = quantile(steps, 0.9);
  p.exposed_ms = median(exposed);
  p.communication_ms = 1e3 * model.communication_s();
  p.bytes_sent = model.bytes_sent();
  p.buckets = model.buckets();
  // One rank alone, which computes as it does where nobody is beside it.
  Cluster alone = cluster;
  alone.fabric.ranks_per_node = 1;
  const StepProfile& single = profile_for(profiles, 1);
  Job same = job;
  same.zero = 0;
  const Model one(single, same, alone, 1);
  p.compute_ms = 1e3 * median_step(one, largest_factors(cluster.variation, measured, 1, options), false);
  const double samples = static_cast<double>(profile.batch) * job.accumulate;
  p.samples_per_s = 1e3 * samples * ranks / p.step_ms;
  p.efficiency = p.compute_ms / p.step_ms;

  // What a step would take without each.
  p.limit = "computation";
  double shortest = 0.98 * p.step_ms;  // what changes less is no limit
  const auto try_without = [&](const char* name, const Cluster& changed, const std::vector<double>& with) {
    const double ms = 1e3 * median_step(Model(profile, job, changed, nodes), with, true);
    if (ms < shortest) {
      shortest = ms;
      p.limit = name;
    }
  };
  const double endless = std::numeric_limits<double>::infinity();
  const auto links = [&](auto&& change) {
    Cluster changed = cluster;
    changed.measured.clear();
    change(changed.fabric);
    return changed;
  };
  if (model.costs().source(0) == "measured") {
    // What such a time is made of is unknown.
    const double ms = 1e3 * median_step(model, factors, false);
    if (ms < shortest) {
      shortest = ms;
      p.limit = "collectives";
    }
  } else {
    if (nodes > 1)
      try_without("bandwidth between nodes", links([&](Fabric& f) { f.between.bytes_per_s = endless; }), factors);
    if (cluster.fabric.ranks_per_node > 1)
      try_without("bandwidth inside nodes", links([&](Fabric& f) { f.inside.bytes_per_s = endless; }), factors);
    try_without("latency", links([&](Fabric& f) { f.inside.latency_s = f.between.latency_s = 0; }), factors);
    if (cluster.fabric.thread_bytes_per_s > 0 && nodes > 1)
      try_without("moving bytes on the ranks' threads", links([&](Fabric& f) { f.thread_bytes_per_s = endless; }),
                  factors);
  }
  try_without("the slowest rank", cluster, std::vector<double>(factors.size(), 1.0));
  if (job.data_ms > 0 && job.data_ms >= 0.98 * p.step_ms) p.limit = "data";
  return p;
}

}  // namespace lockstep::simulate
