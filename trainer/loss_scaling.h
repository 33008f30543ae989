// Loss scaling in a run: its settings, and its place in checkpoints.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

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
