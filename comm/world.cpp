#include "lockstep/comm/world.h"

#include <climits>

#include <array>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

/// The variables by which one kind of launcher identifies a process.
struct Variables {
  Starter starter;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

// More than any job has. Memory is taken for each rank before the first one is heard of.
constexpr int kMostRanks = 1 << 16;

constexpr std::array kVariables = {
    Variables{Starter::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Variables{Starter::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Variables{Starter::kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};

/// Launchers whose ranks lockstep does not join: what each rank has of them, and its world.
struct OtherLauncher {
  const char *rank, *size;
  const char* who;
};
constexpr std::array kOtherLaunchers = {
    OtherLauncher{"PMI_RANK", "PMI_SIZE", "MPICH's or Intel MPI's mpiexec"},
    OtherLauncher{"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun_rsh"},
    OtherLauncher{"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "flux run"},
    OtherLauncher{"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "jsrun"},
    OtherLauncher{"PALS_RANKID", "PALS_SIZE", "HPE's mpiexec (PALS)"},
    OtherLauncher{"ALPS_APP_PE", "ALPS_APP_SIZE", "aprun"},
    OtherLauncher{"MPIRUN_RANK", "MPIRUN_NPROCS", "another mpirun"},
    OtherLauncher{"PMIX_RANK", "PMIX_SIZE", "a launcher with PMIx, such as prterun"},
};

/// The value of `name` as an integer in [least, most]; nothing when it is not set.
std::optional<int> read_int(const EnvLookup& lookup, const char* name, int least, int most) {
  const auto text = lookup(name);
  if (!text) return std::nullopt;
  const auto value = parse_int(*text);
  if (!value || *value < least || *value > most) {
    const std::string expected = most == INT_MAX ? fmt::format("a whole number of at least {}", least)
                                                 : fmt::format("a whole number from {} to {}", least, most);
    throw UsageError(fmt::format("{}=\"{}\" in the environment, where {} is expected", name, *text, expected),
                     fmt::format("unset {}, or start the processes with lockstep launch or mpirun", name));
  }
  return static_cast<int>(*value);
}

/// Like read_int, for a variable without which `present` makes no sense.
int require_int(const EnvLookup& lookup, const char* name, const char* present, int least, int most) {
  const auto value = read_int(lookup, name, least, most);
  if (!value)
    throw UsageError(fmt::format("{} is set in the environment, but {} is not", present, name),
                     fmt::format("set both or neither; unset {} to run one process", present));
  return *value;
}

/// Slurm exports the step's variables to what srun starts. A batch script or an interactive allocation has the job's
/// own (SLURM_PROCID=0, SLURM_NTASKS=n), but no step: a program started by hand there is a world of one.
bool is_slurm_step(const EnvLookup& lookup) {
  const auto step = lookup("SLURM_STEP_ID");
  if (!step) return false;
  // The batch script and salloc's shell are steps of their own, with numbers close to 2^32.
  const auto number = parse_int(*step);
  return number && *number >= 0 && *number < 0xfffffff0LL;
}

/// Whether MPI would see the same world. torchrun under srun passes the variables of its own process on.
bool is_joined_by_mpi(const EnvLookup& lookup, const World& world) {
  if (lookup("TORCHELASTIC_RUN_ID")) return false;
  const auto is = [&](const char* name, int value) { return lookup(name) == std::to_string(value); };
  for (const char* size : {"PMI_SIZE", "SLURM_NTASKS"})
    if (lookup(size) && !is(size, world.size)) return false;
  return is("PMIX_RANK", world.rank) || is("PMI_RANK", world.rank);
}

// One rank of several that would each be a world of one, and write the same files.
void refuse_other_launchers(const EnvLookup& lookup) {
  for (const auto& [rank, size, who] : kOtherLaunchers) {
    const auto own = lookup(rank), all = lookup(size);
    if ((!own && !all) || all == "1") continue;
    const std::string names = own && all ? fmt::format("{} and {}", rank, size) : own ? rank : size;
    throw UsageError(
        fmt::format("{} {} set in the environment: this is a rank of {}, and lockstep cannot join such ranks", names,
                    own && all ? "are" : "is", who),
        fmt::format("start it with lockstep launch or Open MPI's mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                    "MASTER_PORT; to run one process unset {}",
                    names));
  }
}

// srun gives MPI its ranks through PMIx, or an Open MPI that was built for it, through PMI. MPI ends the process where
// there is neither.
bool is_joined_under_slurm(const EnvLookup& lookup, const World& world) {
  if (world.size == 1 || lookup("PMIX_RANK") || lookup("PMI_RANK")) return true;
  if (lookup("MASTER_ADDR")) return false;  // over TCP
  throw UsageError(
      fmt::format("srun started {} ranks without PMIx, through which MPI joins them", world.size),
      "add --mpi=pmix to srun (srun --mpi=list says whether it has it), or name the host of rank 0: export "
      "MASTER_ADDR=$(scontrol show hostnames | head -n 1)");
}

Rendezvous read_rendezvous(const EnvLookup& lookup) {
  constexpr int kMostPort = 65535;
  Rendezvous rendezvous;
  rendezvous.host = lookup("MASTER_ADDR").value_or(rendezvous.host);
  if (rendezvous.host.empty())
    throw UsageError("MASTER_ADDR in the environment is empty", "set it to the host of rank 0, or unset it");
  rendezvous.port = read_int(lookup, "MASTER_PORT", 1, kMostPort).value_or(rendezvous.port);
  rendezvous.job = lookup("LOCKSTEP_MEETING").value_or(lookup("TORCHELASTIC_RUN_ID").value_or(""));
  rendezvous.listen = lookup("LOCKSTEP_LISTEN").value_or("");
  // torchrun itself listens at the port that it gives its processes.
  if (lookup("TORCHELASTIC_USE_AGENT_STORE") == "True") rendezvous.port += rendezvous.port < kMostPort ? 1 : -1;
  return rendezvous;
}

World read_world(const EnvLookup& lookup, const Variables& names) {
  const char* present = lookup(names.rank) ? names.rank : names.size;
  World world;
  world.starter = names.starter;
  world.size = require_int(lookup, names.size, present, 1, kMostRanks);
  world.rank = require_int(lookup, names.rank, present, 0, INT_MAX);
  if (world.rank >= world.size)
    throw UsageError(fmt::format("{}={} is not below {}={}", names.rank, world.rank, names.size, world.size),
                     "ranks count from 0; give every process its own rank below the world size");
  world.mpi_joins =
      names.starter == Starter::kOpenMpi ||
      (names.starter == Starter::kSlurm ? is_joined_under_slurm(lookup, world) : is_joined_by_mpi(lookup, world));
  world.joins_over_tcp = !world.mpi_joins || lookup("LOCKSTEP_MEETING");
  if (names.starter == Starter::kTorchrun || world.joins_over_tcp) world.rendezvous = read_rendezvous(lookup);
  world.rendezvous.secret = JobSecret::from(lookup);

  const auto local_rank = read_int(lookup, names.local_rank, 0, INT_MAX);
  // SLURM_NTASKS_PER_NODE is what was asked for, and may be larger than the step.
  auto local_size = read_int(lookup, names.local_size, 1, INT_MAX);
  if (names.starter == Starter::kSlurm && local_size && *local_size > world.size) local_size = world.size;
  // A launcher that speaks of no local ranks is taken to run all of them on this host.
  if (!local_rank && !local_size) {
    world.local_rank = world.rank;
    world.local_size = world.size;
    return world;
  }
  if (!local_rank && world.size > 1 && *local_size < world.size)
    throw UsageError(fmt::format("{} is set in the environment, but {} is not", names.local_size, names.local_rank),
                     "set both: they say which device of its host each process takes");
  world.local_rank = local_rank.value_or(world.rank);
  // Slurm may not say how many tasks a node has: at least the ones up to this.
  world.local_size = local_size.value_or(names.starter == Starter::kSlurm ? world.local_rank + 1 : world.size);
  if (names.starter == Starter::kSlurm && world.local_size <= world.local_rank) world.local_size = world.local_rank + 1;
  if (world.local_rank >= world.local_size)
    throw UsageError(
        fmt::format("{}={} is not below {}={}", names.local_rank, world.local_rank, names.local_size, world.local_size),
        "local ranks count the processes of one host from 0");
  if (world.local_size > world.size)
    throw UsageError(fmt::format("{}={} is above {}={}", names.local_size, world.local_size, names.size, world.size),
                     "a host cannot run more processes than the world has");
  return world;
}

}  // namespace

const char* name_of(Starter starter) {
  switch (starter) {
    case Starter::kNone: return "none";
    case Starter::kOpenMpi: return "Open MPI";
    case Starter::kTorchrun: return "RANK and WORLD_SIZE";
    case Starter::kSlurm: return "Slurm";
  }
  return "?";
}

World discover_world(const EnvLookup& lookup) {
  for (const Variables& names : kVariables) {
    if (!lookup(names.rank) && !lookup(names.size)) continue;
    if (names.starter == Starter::kSlurm && !is_slurm_step(lookup)) continue;
    return read_world(lookup, names);
  }
  refuse_other_launchers(lookup);
  return {};
}

}  // namespace lockstep::comm
