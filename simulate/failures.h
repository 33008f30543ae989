// What failures cost a run that writes checkpoints, and how often it should write them.
#pragma once

namespace lockstep::simulate {

/// Times in seconds. Failures come at random, independent of each other (a Poisson process).
struct Failures {
  double node_mtbf_s = 0;   // mean time between failures of one node; 0: none fails
  double checkpoint_s = 0;  // in which training stands still for a checkpoint
  double restart_s = 0;     // from a failure until training continues at the last checkpoint
};

/// J. W. Young, "A first order approximation to the optimum checkpoint interval", Comm. ACM 17 (1974): √(2 δ M), from
/// the end of one checkpoint to the beginning of the next, for a mean time M between failures of all `nodes` nodes and
/// checkpoints of δ. Infinite where nothing fails.
double young_interval_s(const Failures& failures, int nodes);
/// J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
/// Computer Systems 22 (2006), equation 37: better where δ is no longer small beside M.
double daly_interval_s(const Failures& failures, int nodes);
/// Wall time ÷ time of training without checkpoints and failures, with checkpoints after each `interval_s` of training
/// (Daly, equation 20): M e^(R / M) (e^((τ + δ) / M) - 1) / τ. At least 1.
double slowdown(const Failures& failures, int nodes, double interval_s);

}  // namespace lockstep::simulate
