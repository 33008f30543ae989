// The identity of this process among the processes of its job.
#pragma once

#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::comm {

enum class Starter { kNone, kOpenMpi, kTorchrun, kSlurm };

/// How the ranks of a job find each other when no MPI joins them: rank 0 listens there.
struct Rendezvous {
  std::string host = "127.0.0.1";  // a name or an address
  int port = 29500;
  std::string job;          // ranks of another one are rejected; empty where the launcher names none
  std::string listen = {};  // addresses of rank 0's own to listen at, with commas; empty: those of `host`
  JobSecret secret = {};    // peers that do not know it are rejected
  bool encrypts = false;    // all that ranks say to each other over sockets between hosts; takes a secret over TCP
};

/// The job as the environment describes it; nothing has been started yet.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  Starter starter = Starter::kNone;
  bool mpi_joins = false;       // what has started this process also gives MPI its rank
  bool joins_over_tcp = false;  // at `rendezvous`; MPI is started only if it is asked for
  Rendezvous rendezvous = {};

  /// Whether a TCP store introduces the ranks to each other, and not MPI.
  bool over_tcp() const { return !mpi_joins || joins_over_tcp; }
};

const char* name_of(Starter starter);

/// Reads, in this order: OMPI_COMM_WORLD_*, RANK/WORLD_SIZE/LOCAL_RANK/LOCAL_WORLD_SIZE, SLURM_PROCID/NTASKS/LOCALID.
/// None of them: a world of one. RANK and WORLD_SIZE bring MASTER_ADDR and MASTER_PORT along; MPI joins such a world
/// only if PMIX_RANK or PMI_RANK say that a process manager has given this process the same rank (srun --mpi=pmix, with
/// RANK exported from its variables), and torchrun has not started it; where it does not, they join over TCP. So do
/// ranks under any launcher that exports LOCKSTEP_MEETING, the name of the job, beside MASTER_ADDR and MASTER_PORT
/// (`lockstep launch` on several hosts). LOCKSTEP_LISTEN and LOCKSTEP_JOB_SECRET are read for all of them. Throws
/// UsageError when a set is incomplete, not numeric or contradicts itself, naming the variable.
World discover_world(const EnvLookup& lookup);

}  // namespace lockstep::comm
