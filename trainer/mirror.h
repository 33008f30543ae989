// Where a run's second copy of its checkpoints is written, and by which rank.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/trainer/config.h"

namespace lockstep::trainer {

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

}  // namespace lockstep::trainer
