// Ranks joined by MPI.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/store.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

struct MpiRanks;

// A build without MPI throws DeviceError from all of them. `over` is a communicator of the program's (session.h);
// nullptr: MPI_COMM_WORLD.

/// Joins MPI's world, which must have the rank and size of `world`; its thread is the one that calls MPI from then on.
/// Starts MPI unless the program has (Note [Whose MPI]).
std::unique_ptr<Store> make_mpi_store(const World& world, Deadline deadline, const MpiRanks* over = nullptr);

/// The group of the ranks of `store`, which make_mpi_store() has made: the calling thread moves it on. Its shutdown()
/// ends the store.
std::unique_ptr<ProcessGroup> make_mpi_group(std::unique_ptr<Store> store, Clock::duration timeout);

/// Both in one; `options` say whether a thread of the group is to call MPI.
std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options,
                                             const MpiRanks* over = nullptr);

/// Whether groups of some of its ranks can be made of `store` by make_mpi_store(), on the calling thread: it has
/// MPI.
bool has_mpi(const Store* store);
/// Joins some ranks of `store`, which has_mpi(); collective among them. `members` are their numbers in it, in the order
/// of the ranks of `world`, and `job_ranks` those in the job.
std::unique_ptr<Store> make_mpi_store(const World& world, const Store& store, const std::vector<int>& members,
                                      JobRanks job_ranks, bool oversubscribed, Deadline deadline);

/// Whether this build can join several processes by MPI.
bool mpi_available();

/// "Open MPI v4.1.4, …" in one line; "none" in a build without MPI. Does not start MPI.
std::string mpi_library_version();

}  // namespace lockstep::comm
