// Which way of communicating makes steps shortest, and what each costs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "simulate/step_model.h"

namespace lockstep::simulate {

/// Advice is only given for what saves at least so large a share of a step: predictions are no better.
inline constexpr double kLeastGain = 0.01;
/// Compression changes what is trained, and has to save this.
inline constexpr double kLeastGainOfCompression = 0.03;

struct Candidate {
  Job job;
  Prediction prediction;
};

struct Advice {
  Candidate as_asked;  // the job as it was given
  /// The shortest step whose gradients are the same: bucket sizes and ZeRO. `as_asked` where nothing saves kLeastGain.
  Candidate best;
  /// The same, ZeRO, with the best bucket size: what it costs in time for less memory. Nothing on one rank.
  std::optional<Candidate> sharded;
  /// The shortest with each hook, the fastest first; empty on one rank.
  std::vector<Candidate> compressed;
  bool compression_worth = false;  // the first of them saves kLeastGainOfCompression beside `best`
  std::string because;             // of that
  /// With 2, 4 and 8 times the parts of a step, by samples per second: the fewest that reach 99 % of the most.
  Candidate accumulated;
};

/// Bucket sizes that are tried, in MiB: powers of two from 1 to 64, 25, and all gradients in one.
std::vector<std::size_t> bucket_sizes();

Advice advise(std::span<const StepProfile> profiles, const Job& job, const Cluster& cluster, int nodes,
              const TrialOptions& options);

/// "--bucket-mb 4 --zero 1": what differs from `than`; empty: nothing.
std::string flags_of(const Job& job, const Job& than);

}  // namespace lockstep::simulate
