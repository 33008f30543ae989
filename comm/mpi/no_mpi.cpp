// Stands in for comm/mpi/ in a build that found no MPI.
#include "base/error.h"
#include "comm/mpi/mpi_group.h"
#include "comm/mpi/mpi_info.h"

namespace lockstep::comm {

bool mpi_available() { return false; }
std::string mpi_library_version() { return "none"; }

std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions&) {
  throw DeviceError(fmt::format("{} processes were started (by {}), but this build has no MPI to join them", world.size,
                                name_of(world.starter)),
                    "install libopenmpi-dev and openmpi-bin and build again, or start one process");
}

}  // namespace lockstep::comm
