// What is known of MPI without starting it.
#pragma once

#include <string>

namespace lockstep::comm {

/// Whether this build can join several processes.
bool mpi_available();

/// "Open MPI v4.1.4, …" in one line; "none" in a build without MPI. Does not start MPI.
std::string mpi_library_version();

}  // namespace lockstep::comm
