// Checkpoints of which each rank writes and reads its part (checkpoint: Note [Checkpoints in parts]).
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoints.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/config.h"

namespace lockstep::trainer {

/// Whether the ranks of a run are to write their parts, where all see the directory. A mirror is for hosts that share
/// none: each copy is of one rank, which gathers what it has not.
bool in_parts(const TrainConfig& config, int ranks);

/// A directory for checkpoints, as the ranks see it.
struct SeenDirectory {
  std::string path;
  std::string attempt;         // OwnPart's
  std::vector<int> elsewhere;  // ranks that do not see rank 0's, or cannot write there; if any, none writes a part
};

/// Collective: makes the directory if it is not there, and has each rank make a file in it, which goes again.
SeenDirectory look_at_directory(const std::string& path, comm::ProcessGroup& group);

/// This rank's part of the checkpoints in `directory`, whose layout goes into `plan`. Nothing where rank 0 writes the
/// moments as one file: the optimizer has no slices or remembers nothing, the group is one rank, or ranks are
/// elsewhere, which rank 0 says.
std::optional<checkpoint::OwnPart> place_part(const SeenDirectory& directory, const comm::ProcessGroup& group,
                                              const parallel::DistributedDataParallel& ddp,
                                              const nn::Optimizer& optimizer, checkpoint::CheckpointManifest& plan);

/// Collective, before a checkpoint is taken: the one before is complete on rank 0
/// afterwards, or is known not to become so. Nothing to do where checkpoints are not in parts.
void settle_parts(checkpoint::Checkpoints& checkpoints, comm::ProcessGroup& group);

/// Collective: the same and Checkpoints::finish().
bool finish_checkpoints(checkpoint::Checkpoints& checkpoints, comm::ProcessGroup& group);

/// Collective, before a checkpoint is taken: what the optimizers of slices remember, as a whole on rank `root`, where
/// the copy of the checkpoint before is freed for it. Nothing elsewhere, and where no moments are to be gathered:
/// there are no slices, or checkpoints are in parts.
std::vector<std::vector<std::byte>> gather_moments(checkpoint::Checkpoints& checkpoints,
                                                   const parallel::DistributedDataParallel& ddp,
                                                   const nn::Optimizer& optimizer, int root);

/// What `optimizer` remembers of `slices` (by parameter), from the checkpoint at `path`, which is in parts: the bytes
/// of each of its moments(). Files with nothing of them are not opened. Throws IoError where the parts do not have what
/// the optimizer remembers, all of it and once.
std::vector<std::vector<std::byte>> read_moments(const std::string& path,
                                                 const checkpoint::CheckpointManifest& manifest,
                                                 const nn::Optimizer& optimizer,
                                                 std::span<const nn::ParameterSlice> slices);

/// The slices that are all of each parameter.
std::vector<nn::ParameterSlice> whole_slices(const nn::Optimizer& optimizer);

/// Collective: whether every rank sees this checkpoint at rank `reader`'s path for it, which is returned then.
std::optional<std::string> path_for_all(const checkpoint::Resumed& resumed, comm::ProcessGroup& group);

}  // namespace lockstep::trainer
