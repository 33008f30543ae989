// What checkpoints say of the data that a run was trained on.
#pragma once

#include <string>

#include "checkpoint/manifest.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"

namespace lockstep::trainer {

/// For a checkpoint's manifest: the classes' names, samples of each, the alphabet, and digests of some samples, spread
/// evenly, which are read for it. Collective: what rank 0 has. Throws what reading them throws.
checkpoint::Facts data_facts_of(const data::Dataset& dataset, comm::ProcessGroup& group);

/// Throws CheckpointError naming `path` and what differs between the data of a checkpoint, `there`, and those of the
/// run that resumes. `accepted`: a warning says it instead, unless the run's tokens mean something else. What one of
/// them does not know, an earlier version's checkpoint say, is not compared.
void check_same_data(const checkpoint::Facts& there, const checkpoint::Facts& here, const std::string& path,
                     bool accepted);

}  // namespace lockstep::trainer
