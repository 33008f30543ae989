// Resuming from a checkpoint.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/config.h"
#include "trainer/carried_state.h"
#include "trainer/mirror.h"

namespace lockstep::trainer {

/// What this run's checkpoints say of it. A run that resumes must have the same `identity`; `settings` may be
/// others, the number of ranks and of steps among them.
checkpoint::CheckpointManifest plan_of(const TrainConfig& config, const data::Dataset& dataset, int world_size,
                                       std::int64_t total_steps);

/// Collective. Rank 0 finds what `options` name, with the others' help (Note [Shared verification]), and puts its
/// parameters and buffers into `module`; every rank gets to know the manifest. With a mirror (else nullptr), the lowest
/// rank of each host looks into both directories for `auto`, the newest whole checkpoint of all is taken, and where
/// another rank than 0 has read it, rank 0 has its state too then. Nothing: there is none to resume from, which `auto`
/// allows, or it was not asked for. Throws CheckpointError if a required one is missing, if none is whole, or if it is
/// of another run than `plan`. `group` joins the ranks' processes, `gradients` their devices.
std::optional<checkpoint::Resumed> resume_module(const checkpoint::CheckpointOptions& options, const Mirror* mirror,
                                                 comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                                                 const checkpoint::CheckpointManifest& plan, nn::Module& module);

/// For a checkpoint's manifest.
checkpoint::BucketLayout bucket_layout_of(const parallel::DistributedDataParallel& ddp);

/// Collective, after `ddp` has been made of that module: gives every rank the optimizer's state, the order of buckets
/// and, where it was chosen for as many ranks, their size, and sees to it that all have the same bits. Of
/// a checkpoint in parts each rank of an optimizer of slices reads what it remembers, if all ranks see it.
void resume_optimizer(const checkpoint::Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                      nn::Optimizer& optimizer, parallel::DistributedDataParallel& ddp);

/// Runs `work` on the checkpoint at `path`; what it throws becomes a CheckpointError that names it.
void run_on_checkpoint(const std::string& path, FunctionRef<void()> work);
/// Collective, after resume_optimizer(): the moving average of the parameters.
void resume_average(const checkpoint::Resumed& resumed, comm::ProcessGroup& group, comm::ProcessGroup& gradients,
                    nn::MovingAverage& average);

/// Collective: gives every rank its part of what the model carried at the checkpoint, unless an epoch begins there.
void resume_carried(const checkpoint::Resumed& resumed, comm::ProcessGroup& group, CarriedState& carried);

}  // namespace lockstep::trainer
