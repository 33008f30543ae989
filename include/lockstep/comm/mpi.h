// Groups over communicators of MPI's that a program has: for builds with MPI. The only public header that includes
// another library's; lockstep/comm.h does not include it.
#pragma once

#include <mpi.h>

#include <memory>

#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// The group of the ranks of `comm`, an intracommunicator, with their numbers in it; collective among them, blocking.
/// MPI runs already, and the program ends it: after shutdown(), which frees what the group has made. `comm` may be
/// freed as soon as this returns; nothing is sent over it. Several groups, over any communicators, may live at a time
/// (Note [Several groups]). Messages name ranks by their numbers in MPI_COMM_WORLD.
///
/// As make_group() of a world that MPI joins: the backend is chosen by `options`, so ranks on one host share memory,
/// and MPI only introduces them to each other. Throws UsageError for MPI_COMM_NULL and intercommunicators, if MPI does
/// not run, and if this thread may not call it; and all that the other make_group() throws.
std::unique_ptr<ProcessGroup> make_group(MPI_Comm comm, const GroupOptions& options = {});

}  // namespace lockstep::comm
