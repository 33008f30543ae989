// What a run carries from each step to the next beside parameters and moments, and its place in checkpoints: a model's
// state (--stateful), what a communication hook keeps, the scale of losses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/sampler/slice.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// What a model carries from each batch to the next: of this rank's places of the global batch, and of all. With
/// samples in the order of columns (sampler: Note [Columns]), of which this rank has the same in all steps. Module
/// and group must outlive it.
class CarriedState {
 public:
  /// From now on the module carries its state, which begins with zeros. Throws UsageError for one that carries none.
  CarriedState(nn::Module& module, comm::ProcessGroup& group, std::uint64_t global_batch, DType activations);

  /// Zeros again, in the order of the device's work: where an epoch begins.
  void reset();
  /// Collective: of all ranks' columns, (global batch, …) in f32; on rank `root`, nothing elsewhere.
  std::vector<nn::HostTensor> gather(int root = 0) const;
  /// Collective: continues with what gather() has returned, on any number of ranks; `all` is rank
  /// `reader`'s, and is of `source`. Throws IoError there, and PeerError elsewhere, where it is of another model or
  /// batch.
  void restore(const std::vector<nn::HostTensor>& all, const std::string& source, int reader = 0);

 private:
  comm::ProcessGroup& group_;
  std::uint64_t global_batch_;
  sampler::Slice columns_;
  std::vector<nn::NamedBuffer> parts_;  // (columns, …); of one row where this rank has none
};

// What a communication hook keeps from step to step.

/// Collective: ddp::CommHook::state() on rank `root`, nothing elsewhere: tensors of the hook's name and the state's
/// ("powersgd:4.error"), f32, of one dimension, or with a row for each rank where each has its own. nullptr, and a hook
/// that keeps nothing: no tensors.
std::vector<nn::HostTensor> gather_hook_state(ddp::CommHook* hook, comm::ProcessGroup& group, int root = 0);

/// Collective: continues with what gather_hook_state() has returned, from the file that the checkpoint's manifest
/// lists. At another number of ranks the sum of what ranks have kept each for themselves stays: each begins with the
/// same share of it, and one rank says so. If the checkpoint is of another hook, or of none, the hook starts without
/// state, and one rank reports that. Throws CheckpointError if the file does not fit this model.
void resume_hook_state(const checkpoint::Resumed& resumed, ddp::CommHook* hook, comm::ProcessGroup& group);

// Loss scaling.

inline constexpr const char* kDynamic = "dynamic";  // TrainConfig::loss_scale

/// Whether `text` is kDynamic, nothing, or a positive number of f32.
bool is_loss_scale(const std::string& text);

/// Of a run in fp16; nullptr: others scale no losses.
std::unique_ptr<nn::GradScaler> make_grad_scaler(const TrainConfig& config, nn::Backend& backend);

/// Between steps, for reports: nothing where there is no scaler. Waits for the device.
std::optional<LossScaling> scaling_of(const nn::GradScaler* scaler);

/// GradScaler::state() as a tensor, the same on all ranks; no tensors where there is no scaler. Waits for the device.
std::vector<nn::HostTensor> scaler_tensors(const nn::GradScaler* scaler);
/// Collective: continues with what scaler_tensors() has returned, from the file that the checkpoint's manifest lists.
/// If it lists none, losses were not scaled, and the scale starts at its first value; one rank reports that. Throws
/// CheckpointError where the file is none of scaler_tensors().
void resume_scaler(const checkpoint::Resumed& resumed, nn::GradScaler& scaler, comm::ProcessGroup& group);

}  // namespace lockstep::trainer
