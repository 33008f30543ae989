// MPI's messages as a backend, which a build without MPI has too, to say so.
#include "comm/backends.h"
#include "comm/mpi/mpi_group.h"

namespace lockstep::comm {

const BackendFamily& mpi_backend() {
  static const BackendFamily family{
      .name = "mpi",
      .title = "MPI",
      .about = "MPI's messages",
      .is_built = mpi_available,
      .library_version = mpi_library_version,
      .lack = [](const World& world, const GroupOptions& options, const Peers*) -> std::optional<Lack> {
        // Asked for by name, MPI is started even where the ranks could join without it.
        const bool named = options.backend == mpi_backend().name;
        if (named ? world.mpi_joins : !world.over_tcp()) return std::nullopt;
        return Lack{"RANK and WORLD_SIZE join processes without MPI",
                    "start them with mpirun, srun --mpi=pmix or lockstep launch"};
      },
      .make = [](JoinedRanks ranks) { return make_mpi_group(std::move(ranks.store), ranks.timeout); },
      .start = [](const World& world, const GroupOptions& options) { return make_mpi_group(world, options); },
  };
  return family;
}

}  // namespace lockstep::comm
