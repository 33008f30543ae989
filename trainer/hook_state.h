// What a communication hook keeps from step to step, in checkpoints.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/io/safetensors.h"

namespace lockstep::trainer {

/// Collective: ddp::CommHook::state() on rank `root`, nothing elsewhere: tensors of the hook's name and the state's
/// ("powersgd:4.error"), f32, of one dimension, or with a row for each rank where each has its own. nullptr, and a hook
/// that keeps nothing: no tensors.
std::vector<nn::HostTensor> gather_hook_state(ddp::CommHook* hook, comm::ProcessGroup& group, int root = 0);

/// Collective: continues with what gather_hook_state() has returned, from the file that the checkpoint's manifest
/// lists. At another number of ranks the sum of what ranks have kept each for themselves stays: each begins with the
/// same share of it, and one rank says so. If the checkpoint is of another hook, or of none, the hook starts without
/// state, and one rank reports that. Throws CheckpointError if the file does not fit this model.
void resume_hook_state(const checkpoint::Resumed& resumed, ddp::CommHook* hook, comm::ProcessGroup& group);

}  // namespace lockstep::trainer
