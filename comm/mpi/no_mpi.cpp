// Stands in for comm/mpi/ in a build that found no MPI.
#include "base/error.h"
#include "comm/mpi/mpi_group.h"

namespace lockstep::comm {

bool mpi_available() { return false; }
std::string mpi_library_version() { return "none"; }

std::unique_ptr<Store> make_mpi_store(const World& world, Deadline, const MpiRanks*) {
  throw DeviceError(fmt::format("{} processes were started (by {}), but this build has no MPI to join them", world.size,
                                name_of(world.starter)),
                    "install libopenmpi-dev and openmpi-bin and build again; or start the processes of one host with "
                    "RANK and WORLD_SIZE in the environment, which needs no MPI");
}

bool has_mpi(const Store*) { return false; }

std::unique_ptr<Store> make_mpi_store(const World&, const Store&, const std::vector<int>&, JobRanks, bool, Deadline) {
  throw InternalError("a store over MPI in a build without");
}

std::unique_ptr<ProcessGroup> make_mpi_group(std::unique_ptr<Store>, Clock::duration) {
  throw InternalError("a group over MPI in a build without");
}

std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options, const MpiRanks*) {
  return make_mpi_group(make_mpi_store(world, Deadline::after_seconds(options.timeout_seconds)), {});
}

}  // namespace lockstep::comm
