#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "comm/mpi/session.h"
#include "comm/subgroup.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/mpi.h"

namespace lockstep::comm {
namespace {

constexpr const char* kDoing = "looking at the communicator";

void check_comm(MPI_Comm comm) {
  int initialized = 0, finalized = 0, is_inter = 0;
  check_mpi(MPI_Initialized(&initialized), kDoing);
  check_mpi(MPI_Finalized(&finalized), kDoing);
  check_usage(initialized != 0, "a group over a communicator, and MPI has not been started in this process",
              "call MPI_Init before");
  check_usage(finalized == 0, "a group over a communicator, and MPI has been ended in this process",
              "make groups before MPI_Finalize");
  check_usage(comm != MPI_COMM_NULL, "a group over MPI_COMM_NULL", "name a communicator that this process is in");
  check_mpi(MPI_Comm_test_inter(comm, &is_inter), kDoing);
  check_usage(is_inter == 0, "a group over an intercommunicator", "merge it first (MPI_Intercomm_merge)");
}

World world_of(MPI_Comm comm) {
  World world{.mpi_joins = true};
  MPI_Comm here = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(comm, &world.rank), kDoing);
  check_mpi(MPI_Comm_size(comm, &world.size), kDoing);
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here), kDoing);
  check_mpi(MPI_Comm_rank(here, &world.local_rank), kDoing);
  check_mpi(MPI_Comm_size(here, &world.local_size), kDoing);
  check_mpi(MPI_Comm_free(&here), kDoing);
  world.rendezvous.secret = JobSecret::from(env);
  return world;
}

/// Where they differ from those in `comm`, and all ranks are in MPI_COMM_WORLD.
JobRanks job_ranks_of(MPI_Comm comm, int size) {
  MPI_Group ours = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  std::vector<int> numbers(static_cast<std::size_t>(size)), in_world(numbers.size());
  for (int rank = 0; rank < size; ++rank) numbers[static_cast<std::size_t>(rank)] = rank;
  check_mpi(MPI_Comm_group(comm, &ours), kDoing);
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &all), kDoing);
  check_mpi(MPI_Group_translate_ranks(ours, size, numbers.data(), all, in_world.data()), kDoing);
  check_mpi(MPI_Group_free(&ours), kDoing);
  check_mpi(MPI_Group_free(&all), kDoing);
  for (const int rank : in_world)
    if (rank == MPI_UNDEFINED) return {};
  return in_world == numbers ? JobRanks() : JobRanks(std::move(in_world));
}

}  // namespace

std::unique_ptr<ProcessGroup> make_group(MPI_Comm comm, const GroupOptions& options) {
  check_comm(comm);
  check_mpi_thread();
  const World world = world_of(comm);
  MpiRanks ranks{.comm = comm, .job_ranks = job_ranks_of(comm, world.size)};
  int rank = 0, size = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), kDoing);
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), kDoing);
  set_log_identity(rank, size, host_name());
  return make_group_over(world, options, ranks.job_ranks, &ranks);
}

}  // namespace lockstep::comm
