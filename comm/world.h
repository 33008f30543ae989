// Who this process is among the processes of its job.
#pragma once

#include <string>

#include "base/env.h"

namespace lockstep::comm {

enum class Starter { kNone, kOpenMpi, kTorchrun, kSlurm };

/// What the environment says; nothing has been started yet.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  Starter starter = Starter::kNone;
};

const char* name_of(Starter starter);

/// Reads, in this order: OMPI_COMM_WORLD_*, RANK/WORLD_SIZE/LOCAL_RANK/LOCAL_WORLD_SIZE, SLURM_PROCID/NTASKS/LOCALID.
/// None of them: a world of one. Throws UsageError when a set is incomplete, not numeric or contradicts itself,
/// naming the variable.
World discover_world(const EnvLookup& lookup);

/// This machine's name, without its domain.
std::string host_name();

}  // namespace lockstep::comm
