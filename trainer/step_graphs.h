// Steps that a device has captured as graphs, by their number of samples.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "nn/layers/module.h"
#include "nn/ops/backend.h"
#include "parallel/distributed_data_parallel.h"
#include "trainer/forward.h"

namespace lockstep::trainer {

/// Note [Step graphs]
/// A step with the kernels and addresses of an earlier one is captured once (on GPUs as a CUDA graph) and then given to
/// the device with one call: forward, backward, collectives and update. All that changes lies in device memory: the
/// batch is copied to where the graph reads it, learning rate and bias corrections are in the optimizer's control
/// tensor, losses go out through the reducer's tail. A graph holds for one number of samples, which is a constant of
/// its kernels. Other steps are not captured: the last one of an epoch, until it has come often enough, and the first
/// ones, which allocate memory and build plans.
///
/// NCCL wants an operation to be captured on all ranks or on none. So what decides is the number of samples of all
/// ranks together, which all of them know, and they agree on whether the capture has worked. A rank without samples
/// captures that it contributes nothing.
///
/// Backend and `ddp` must outlive it; it must end before the group does. One thread uses it.
class StepGraphs {
 public:
  StepGraphs(nn::Backend& backend, parallel::DistributedDataParallel& ddp, DType activations);

  /// Collective. Runs step `step`, of `global_count` samples on all ranks together, on `inputs` (undefined where this
  /// rank has none), from a graph, which it captures with `compute` if it is time to, or in preparation of one: true.
  /// False: the caller runs the step itself. `compute` is the whole step, from the first forward to the update.
  bool run(std::int64_t step, std::uint64_t global_count, const Inputs& inputs,
           FunctionRef<void(const Inputs&)> compute);

  /// Why a step that repeats was not captured; empty where none was refused.
  const std::string& refusal() const { return refusal_; }
  /// How many steps have been run from graphs.
  std::int64_t replayed() const { return replayed_; }

 private:
  struct Entry {
    std::uint64_t global_count = 0;
    Inputs inputs;  // where the graph reads; undefined: there is nothing to read
    bool rehearsed = false;
    int seen = 0;  // steps of this size that have run as they are
    std::unique_ptr<nn::CapturedGraph> graph;
    std::uint64_t operations = 0;         // collectives of it
    std::vector<const BFloat16*> copies;  // of the parameters, which it writes; nullptr: none
  };
  Entry& entry_of(std::uint64_t global_count);
  void capture(Entry& entry, FunctionRef<void(const Inputs&)> compute);
  void refresh_copies();
  void note_update(const Entry& entry);

  nn::Backend& backend_;
  parallel::DistributedDataParallel& ddp_;
  std::vector<nn::NamedParameter> parameters_;  // those that are not trained, too
  DType activations_;
  std::vector<Entry> entries_;  // few
  std::string refusal_;
  std::int64_t replayed_ = 0;
};

}  // namespace lockstep::trainer
