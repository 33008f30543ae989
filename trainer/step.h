// One training step: forward, backward, and the update as the sums arrive.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/loader.h"
#include "nn/optim/optimizer.h"
#include "trainer/config.h"
#include "trainer/layer_trace.h"
#include "trainer/replica.h"
#include "trainer/trace.h"

namespace lockstep::trainer {

/// What training a replica repeats. Backend, module, replica and trace must outlive it; one thread uses it.
class TrainingStep {
 public:
  struct Options {
    double clip_norm = 0;    // 0: no clipping
    bool want_norm = false;  // of the gradients, also without clipping
    Trace* trace = nullptr;  // nullptr: none
  };

  /// `sample_dims`: of one sample, without N.
  TrainingStep(nn::Backend& backend, nn::Module& module, Replica& replica, std::unique_ptr<nn::Optimizer> optimizer,
               std::vector<std::int64_t> sample_dims, const Options& options);

  struct Outcome {
    Replica::Totals totals;    // over the global batch
    double grad_norm = 0;      // L2, before clipping; 0 where it is not wanted
    Clock::duration waited{};  // of the step, stood waiting for collectives
  };

  /// Collective: step `step` (from 1) with learning rate `lr`. Parameters stay as they were where the loss is not
  /// finite; no rank returns before it has taken part in all collectives.
  Outcome run(std::int64_t step, const data::Batch& batch, double lr);

 private:
  void forward_and_backward(const data::Batch& batch);
  void update(double lr, Outcome& outcome);
  void update_bucket(std::span<const std::size_t> slots, bool finite, double& squares);

  nn::Backend& backend_;
  nn::Module& module_;
  Replica& replica_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  std::vector<std::int64_t> sample_dims_;
  Options options_;
  nn::Tape tape_;
  std::unique_ptr<LayerTrace> layers_;
};

}  // namespace lockstep::trainer
