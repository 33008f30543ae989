#include "comm/mpi/mpi_info.h"

#include <mpi.h>

#include <array>

namespace lockstep::comm {

bool mpi_available() { return true; }

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  const std::string version(text.data());
  return version.substr(0, version.find_first_of("\n\r"));
}

}  // namespace lockstep::comm
