// Local SGD: ranks that move their parameters alone, and average them now and then.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::parallel {

/// A hook of DistributedDataParallel that carries no gradients: each rank keeps its own, and only scalars() and the
/// counts of unused parameters are summed.
///
/// Note [Local SGD]
/// Every rank takes K steps by its own gradients; then their parameters, and the optimizers' moments, become the mean
/// over ranks (Stich, "Local SGD converges fast and communicates little", 2019; of the moments: Yu, Jin and Yang, "On
/// the linear speedup analysis of communication efficient momentum SGD", 2019). PyTorch's PeriodicModelAverager
/// averages the parameters alone. Here all ranks hold the same again after each averaging, so that a checkpoint is one.
/// A loss that is scaled by ranks / samples of all ranks makes the mean over ranks of one SGD step that of the global
/// batch's gradient.
std::shared_ptr<ddp::CommHook> make_local_hook();

/// Averages tensors over ranks, in place.
class ModelAverager {
 public:
  /// Collective: compares the tensors' sizes (OutOfStepError where ranks differ), and allocates what they pass through.
  /// f32 (else UsageError), on `group`'s device and without gaps; group and backend must outlive its last average(). It
  /// keeps the tensors, which are handles: those of a parameter whose value moves (Parameter::move_value()) do not
  /// follow.
  ModelAverager(comm::ProcessGroup& group, nn::Backend& backend, std::vector<nn::Tensor> tensors);
  ~ModelAverager();
  ModelAverager(const ModelAverager&) = delete;
  ModelAverager& operator=(const ModelAverager&) = delete;

  /// Collective: each tensor becomes the mean over ranks (the sum in f32, times 1 / ranks), the same bits on all of
  /// them, where work given to the backend's stream finds it; after an error some may be averaged. The caller then
  /// calls nn::Parameter::changed() of those that are parameters. Values that are equal already may be rounded.
  void average();
  /// What average() sums, in bytes.
  std::size_t bytes() const { return bytes_; }
  /// What it allocates for so many of them.
  static std::size_t arena_bytes(std::size_t bytes);

 private:
  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  std::vector<nn::Tensor> tensors_;
  std::size_t bytes_ = 0;
  std::unique_ptr<comm::Arena> arena_;  // nullptr: there is one rank, or nothing to average
};

}  // namespace lockstep::parallel
