// How long a step takes on many ranks: computation as it was measured on one, collectives as the links allow.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "simulate/collective_cost.h"
#include "simulate/step_profile.h"

namespace lockstep::simulate {

/// How the time of a rank's computation differs from its median.
struct Variation {
  enum class Kind {
    kNone,
    kMeasured,   // as that of the profile's steps, each rank and step by itself
    kNormal,     // 1 + sigma · z, at least 0.5
    kLogNormal,  // exp(sigma · z)
  };
  Kind kind = Kind::kMeasured;
  double sigma = 0;
  /// Beside that, so large a share of all ranks is slower by a factor, always.
  double slow_share = 0, slow_factor = 1;
};

/// What a job does, beside the model and its batch.
struct Job {
  std::optional<std::size_t> bucket_bytes = {};  // default: 25 MiB; on CPUs between nodes 4
  std::optional<std::size_t> first_bucket_bytes = {};
  std::string comm_hook = "none";
  int zero = 0;        // 1: each rank updates its share of the parameters
  int accumulate = 1;  // parts of a step, of the profile's batch each
  double data_ms = 0;  // in which a rank's loader has the next batch ready; steps do not come faster
};

/// What jobs run on.
struct Cluster {
  Fabric fabric;
  Algorithm algorithm = Algorithm::kAuto;
  std::vector<MeasuredTimes> measured;
  /// Share by which computation is slower while a collective is under way that another thread, or the GPU itself, runs.
  double contention = 0;
  Variation variation;
};

struct TrialOptions {
  int trials = 200;  // steps that are simulated
  std::uint64_t seed = 1;
};

/// Times in ms.
struct Prediction {
  int nodes = 1, ranks = 1;
  double step_ms = 0, step_ms_p10 = 0, step_ms_p90 = 0;  // median of the trials
  double compute_ms = 0;                                 // median of one rank alone
  double communication_ms = 0;                           // all collectives, one after the other
  double exposed_ms = 0;                                 // median step minus the same trials' without communication
  double samples_per_s = 0;                              // of all ranks together
  double efficiency = 1;                                 // samples_per_s, of as many times one rank's
  double bytes_sent = 0;                                 // by a rank in a step, if each has a link of its own
  std::size_t buckets = 0;
  std::string limit;  // what would shorten steps most if it cost nothing: "computation", "the network", …
};

/// Note [Simulated steps]
/// Gradients become ready as in the profile, times the rank's factor (Variation). Buckets are ddp::plan_buckets()'s.
/// Collectives run one after the other in the order of the buckets; one starts when the last rank's bucket is ready,
/// and ends for all ranks at once. So of all ranks only the slowest matters: its factor is drawn as the largest of as
/// many, by the quantile U^(1/P) of one uniform U. Where the rank's own thread moves bytes (Cost::thread_s), that time
/// is added to what it computes; else computation is slower by Cluster::contention meanwhile. After backward, each
/// bucket is updated when its sums are there, in order. With ZeRO a bucket is scattered, a share of it updated, and
/// all-gathered while the next step's forward runs (until the first gradient is ready); where the rank's own thread
/// moves bytes it does so before, since nothing does while it computes.
///
/// Hooks: bf16 and fp16 send half of the bytes, and read and write 12 bytes per element at the rate of a copy;
/// powersgd:R sends 4 R (rows + columns) bytes of a matrix that this makes smaller, reads it three times and writes it
/// once; topk:P sends 8 bytes for each of P percent of the elements to every rank, and passes over all four times.

/// `profiles` are of one model, batch and device, measured with other numbers of ranks on a host: the nearest to those
/// of a node counts. At least one.
Prediction simulate_step(std::span<const StepProfile> profiles, const Job& job, const Cluster& cluster, int nodes,
                         const TrialOptions& options);

/// The profile that is meant.
const StepProfile& profile_for(std::span<const StepProfile> profiles, int ranks_per_node);

}  // namespace lockstep::simulate
