// One training step: forward, backward, and the update as the sums arrive.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/loader.h"
#include "nn/optim/optimizer.h"
#include "trainer/async_scalars.h"
#include "trainer/config.h"
#include "trainer/layer_trace.h"
#include "trainer/replica.h"
#include "trainer/step_graphs.h"
#include "trainer/trace.h"

namespace lockstep::trainer {

/// What training a replica repeats. Backend, module, replica and trace must outlive it; one thread uses it.
class TrainingStep {
 public:
  struct Options {
    double clip_norm = 0;             // 0: no clipping
    bool want_norm = false;           // of the gradients, also without clipping
    Trace* trace = nullptr;           // nullptr: none
    DType activations = DType::kF32;  // or kBF16, where the backend computes in it
    bool record = true;               // steps that come again, where the device can; not with a trace
    bool dropout = false;             // whether the module has any; `seed` says what it drops
    std::uint64_t seed = 1;
    int accumulate = 1;        // parts in which a rank's share of a step is computed
    bool in_step = false;      // every rank runs every part, also of no samples: there are collectives in it
    bool keep_inputs = false;  // the first batch's copy on the device is used in all steps: for measurements
  };

  TrainingStep(nn::Backend& backend, nn::Module& module, Replica& replica, std::unique_ptr<nn::Optimizer> optimizer,
               SampleFormat format, const Options& options);

  struct Outcome {
    std::int64_t step = 0;
    Replica::Totals totals;    // over the global batch
    double grad_norm = 0;      // L2, before clipping; 0 where it is not wanted
    Clock::duration waited{};  // of the step, stood waiting for collectives
  };

  /// Collective: step `step` (from 1) with learning rate `lr`. Parameters stay as they were where the loss is not
  /// finite; no rank returns before it has taken part in all collectives. On a device the step may still be under way
  /// then. Not while outcome_due().
  void run(std::int64_t step, const data::Batch& batch, double lr);

  const nn::Optimizer& optimizer() const { return *optimizer_; }

  /// For callers that change what collectives do: recordings of one variant are not used for another.
  void set_variant(int variant) { variant_ = variant; }
  const StepGraphs& recorded() const { return recorded_; }

  /// Outcomes come in the order of the steps, each to be taken once. How many have not been.
  std::size_t outcomes_waiting() const { return totals_.waiting(); }
  /// Whether one must be taken before the next run(): on the CPU after each, on a device one step later.
  bool outcome_due() const { return totals_.full(); }
  /// The oldest; waits for it. Throws what the step has failed with.
  Outcome take_outcome();

 private:
  bool run_recorded(std::int64_t step, const data::Batch& batch);
  void compute(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan);
  void compute_part(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan, const sampler::Slice& part,
                    bool last);
  Inputs rows_of(const Inputs& inputs, const sampler::Slice& part);
  void write_dropout_state(std::int64_t step, const sampler::StepPlan& plan, const sampler::Slice& part);
  void update();
  void update_bucket(std::span<const std::size_t> slots);
  bool wants_norm() const { return options_.want_norm || options_.clip_norm > 0; }

  nn::Backend& backend_;
  nn::Module& module_;
  Replica& replica_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  SampleFormat format_;
  Options options_;
  nn::Tape tape_;
  std::unique_ptr<LayerTrace> layers_;
  Inputs inputs_;  // of this step
  StepGraphs recorded_;
  int variant_ = 0;
  nn::Tensor dropout_state_;      // (3) i64; undefined without dropout
  nn::Tensor squares_;            // () f64, of the gradients of this step
  std::vector<std::size_t> all_;  // parameters
  AsyncScalars totals_, squares_of_steps_;
  struct Begun {
    std::int64_t step;
    Clock::duration waited;
  };
  std::vector<Begun> begun_;  // of those that are waiting
};

}  // namespace lockstep::trainer
