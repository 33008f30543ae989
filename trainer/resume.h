// Resuming from a checkpoint: whether its data are the run's, where it may be, whether it is whole, and its state.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/config.h"
#include "trainer/carried_state.h"

namespace lockstep::trainer {

/// What checkpoints say of the data that a run was trained on: the classes' names, samples of each, the alphabet, and
/// digests of some samples, spread evenly, which are read for it. Collective: what rank 0 has. Throws what reading them
/// throws.
checkpoint::Facts data_facts_of(const data::Dataset& dataset, comm::ProcessGroup& group);
/// The same, not collective: what this rank has.
checkpoint::Facts data_facts_of(const data::Dataset& dataset);

/// Throws CheckpointError naming `path` and what differs between the data of a checkpoint, `there`, and those of the
/// run that resumes. `accepted`: a warning says it instead, unless the run's tokens mean something else. What one of
/// them does not know, an earlier version's checkpoint say, is not compared.
void check_same_data(const checkpoint::Facts& there, const checkpoint::Facts& here, const std::string& path,
                     bool accepted);

/// Note [Shared verification]
/// A checkpoint is used after the SHA-256 of each of its files has been compared. Rank 0 looks for one, and where its
/// moments are in parts the others help: every rank that sees the same manifest under the same path compares some of
/// the files, and rank 0 gets to know what is wrong with any of them before it takes the checkpoint or looks at an
/// older one. With as many ranks as parts each compares the part that it is going to read, and rank 0 all other files
/// too, which it reads for all. Ranks that do not see the checkpoint compare nothing; if none but rank 0 does, it
/// compares all.

/// Collective. Calls `look` on rank 0, which calls `verify` in place of checkpoint::verify_checkpoint() as often as it
/// likes, while the other ranks help. What `look` throws comes out on rank 0 alone; the others return.
void verify_together(comm::ProcessGroup& group, FunctionRef<void(checkpoint::Verify verify)> look);

/// Which of `files`, as checkpoint::files_of() lists them, is compared by the rank that is number `index` of `count`
/// that see the checkpoint. Each is by one of them.
std::vector<std::string> share_of(const std::vector<std::string>& files, const checkpoint::CheckpointManifest& manifest,
                                  std::size_t index, std::size_t count);

/// Note [The mirror of checkpoints]
/// All ranks have the same parameters and moments, to the bit, which they compare before each checkpoint. So nothing is
/// sent for a second copy, but moments of which each rank has a share: another rank takes its own copy, at the same
/// step, and writes it to its own disk, with the same names and the same bytes. Only the buffers, of which ranks may
/// have their own, are made rank 0's before, and what a model carries from batch to batch is gathered there too.
///
/// That rank is the lowest one on another host than rank 0's, or on the host that is named. A run that resumes looks
/// for the newest whole checkpoint in both directories on every host, because ranks may run elsewhere by then: hosts
/// that are lost, or come in another order.
struct Mirror {
  int rank = 0;                // that writes it; -1: none, in an attempt that has no place for it
  std::string directory;       // there
  std::vector<int> on_a_host;  // the lowest rank of each host, which looks into its directories
};

/// Collective: as --checkpoint-mirror says; nothing without it. Throws UsageError if no rank runs on the host, and if
/// the second copy would be lost with the first: on rank 0's host, unless it lies on another file system there, or in a
/// directory that both ranks see. A restarted job may have lost the hosts for it (LOCKSTEP_ATTEMPT). This is then a
/// warning, and another host is taken. If there is none, no rank writes the second copy; existing copies are found all
/// the same.
std::optional<Mirror> place_mirror(const TrainConfig& config, comm::ProcessGroup& group);
/// Those that this rank writes to.
std::vector<std::string> checkpoint_directories(const TrainConfig& config, const std::optional<Mirror>& mirror,
                                                int rank);

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

/// Collective: all ranks' modules get rank `root`'s parameters and buffers.
void broadcast_module(comm::ProcessGroup& gradients, nn::Module& module, int root);

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
