// A build without MPI.
#include "bench/rivals/rivals.h"

namespace lockstep::bench {

std::unique_ptr<Rival> make_mpi_rival(const comm::World&, comm::ProcessGroup&, std::string& missing) {
  missing = "this build has no MPI";
  return nullptr;
}

}  // namespace lockstep::bench
