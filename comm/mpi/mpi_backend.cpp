// MPI's messages as a backend, which a build without MPI has too, to say so.
#include "comm/backends.h"
#include "comm/mpi/mpi_group.h"
#include "comm/subgroup.h"

namespace lockstep::comm {

const BackendFamily& mpi_backend() {
  static const BackendFamily family{
      .name = "mpi",
      .title = "MPI",
      .about = "MPI's messages",
      .is_built = mpi_available,
      .library_version = mpi_library_version,
      .unsupported = [](const World& world, const GroupOptions& options,
                        const Peers* peers) -> std::optional<UnsupportedReason> {
        // Asked for by name, MPI is started even where the ranks could join without it.
        const bool named = options.backend == mpi_backend().name;
        if (named ? world.mpi_joins : !world.over_tcp()) return std::nullopt;
        if (peers != nullptr && !peers->job_ranks().are_all())
          return UnsupportedReason{"the group that is split has no MPI for this thread",
                                   "make it with --backend mpi and Progress::kInline"};
        return UnsupportedReason{"RANK and WORLD_SIZE join processes without MPI",
                                 "start them with mpirun, srun --mpi=pmix or lockstep launch --mpi"};
      },
      .make =
          [](JoinedRanks ranks) {
            if (ranks.subgroup == nullptr) return make_mpi_group(std::move(ranks.store), ranks.timeout());
            const Subgroup& part = *ranks.subgroup;
            auto store = make_mpi_store(ranks.world, *part.parent_store, part.members, part.job_ranks,
                                        part.oversubscribed, Deadline::after(ranks.timeout()));
            return make_mpi_group(std::move(store), ranks.timeout());
          },
      .start = [](const World& world, const GroupOptions& options,
                  const MpiRanks* over) { return make_mpi_group(world, options, over); },
  };
  return family;
}

}  // namespace lockstep::comm
