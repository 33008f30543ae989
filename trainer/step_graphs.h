// Steps that a device has captured as graphs, by their number of samples.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/forward.h"

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
/// The memory of graphs is kept for them, so steps and evaluations that run beside them may find too little. The
/// allocator then asks for it (nn::MemoryHolder): this rank destroys its graphs, and before a step could be run from
/// one again, all ranks agree that none is any more. They agree only where every rank knows that it is due: after a
/// step without a graph, or expect_other_work(). So a rank gives its graphs up only then.
///
/// Backend and `ddp` must outlive it; it must end before the group does. One thread uses it.
class StepGraphs final : private nn::MemoryHolder {
 public:
  StepGraphs(nn::Backend& backend, parallel::DistributedDataParallel& ddp, DType activations);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  /// Collective. Runs step `step`, of `global_count` samples on all ranks together, on `inputs` (undefined where this
  /// rank has none), from a graph, which it captures with `compute` if it is time to, or in preparation of one: true.
  /// False: the caller runs the step itself. `compute` is the whole step, from the first forward to the update.
  bool run(std::int64_t step, std::uint64_t global_count, const Inputs& inputs,
           FunctionRef<void(const Inputs&)> compute);

  /// On all ranks: until the next run() the device does other work, which may need more memory.
  void expect_other_work() { may_give_up_ = true; }
  /// The same, where the next step, of `global_count` samples, is not run from a graph: before its inputs are uploaded.
  void expect_step(std::uint64_t global_count);

  /// Why a step that repeats was not captured; empty where none was refused.
  const std::string& refusal() const { return refusal_; }
  /// How many steps have been run from graphs.
  std::int64_t replayed() const { return replayed_; }
  /// How many kernels the largest graph starts; 0 where there is none.
  std::int64_t kernels() const;

 private:
  struct Entry {
    std::uint64_t global_count = 0;
    Inputs inputs;  // where the graph reads; undefined: there is nothing to read
    int seen = 0;   // steps of this size that have run as they are, the rehearsal too
    std::unique_ptr<nn::CapturedGraph> graph;
    std::uint64_t operations = 0;      // collectives of it
    std::vector<nn::HalfCopy> copies;  // of the parameters, which it writes; or none
  };
  bool give_up() noexcept override;
  bool all_have_them();
  Entry& entry_of(std::uint64_t global_count);
  Inputs memory_for(const Inputs& inputs);
  void capture(Entry& entry, FunctionRef<void(const Inputs&)> compute);
  void capture_together(Entry& entry, FunctionRef<void(const Inputs&)> compute);
  void refresh_copies();
  void note_update(const Entry& entry);

  nn::Backend& backend_;
  parallel::DistributedDataParallel& ddp_;
  std::vector<nn::NamedParameter> parameters_;  // those that are not trained, too
  DType activations_;
  bool sliced_;                        // each rank updates slices of the parameters
  std::vector<Entry> entries_;         // few
  bool rehearsed_ = false;             // a step, so that there is memory of graphs
  const Entry* rehearsing_ = nullptr;  // whose inputs are being read
  bool may_give_up_ = false;           // all ranks agree before the next step from a graph
  bool given_up_ = false;              // by this rank; not agreed yet
  std::string refusal_;
  std::int64_t replayed_ = 0;
};

}  // namespace lockstep::trainer
