// What a job needs of this host before anything is started.
#pragma once

#include <string_view>

namespace lockstep::launcher {

/// Throws DeviceError where there is no /proc, by which the launcher finds its own program and its ranks' processes.
void check_proc();

/// Raises this process' limit of open files, which its ranks inherit, where it is too low for `ranks` ranks on this
/// host. Throws DeviceError where it may not.
void check_open_files(int ranks, bool over_mpirun);

/// Throws DeviceError where mpirun and its daemon cannot reach each other, as where there is IPv6 alone.
void check_mpiruns_loopback();

/// Whether Open MPI 4 ends by SIGABRT on a host of this name: its PMIx takes 56 characters.
bool is_too_long_for_open_mpi(std::string_view host);

}  // namespace lockstep::launcher
