#include "comm/make_group.h"

#include "base/error.h"
#include "base/log.h"
#include "comm/mpi/mpi_group.h"
#include "comm/self_group.h"
#include "comm/shm/shm_group.h"
#include "comm/tcp/tcp_store.h"

namespace lockstep::comm {
namespace {

using Backend = GroupOptions::Backend;
using Progress = GroupOptions::Progress;

std::unique_ptr<ProcessGroup> make_shared_group(const World& world, const GroupOptions& options,
                                                Clock::duration timeout) {
  auto store = make_mpi_store(world, Deadline::after(timeout));
  if (options.backend == Backend::kShm) return make_shm_group(std::move(store), timeout);
  const auto decline = [&](const Error& error) {
    if (world.rank == 0) log_warn("{}: data goes through MPI, which is slower", error.what());
  };
  try {
    return make_shm_group(std::move(store), timeout);
  } catch (const DeviceError& error) {
    decline(error);
  } catch (const PeerError& error) {
    decline(error);
  }
  return make_mpi_group(std::move(store), timeout);
}

/// Why ranks that MPI has not joined can have no such group; empty where they can.
std::string lack_of_mpi(const World& world, const GroupOptions& options) {
  if (world.local_size < world.size)
    return fmt::format(
        "{} of {} ranks are on this host (LOCAL_WORLD_SIZE, WORLD_SIZE), and nothing but MPI carries data "
        "between hosts",
        world.local_size, world.size);
  if (options.backend == Backend::kMpi) return "--backend mpi is asked for";
  if (options.progress == Progress::kThread) return "only MPI moves on a thread of its own";
  return {};
}

/// The ranks have agreed that they cannot be a group: none shall take the end of another for what went wrong.
void part(Store& store, Clock::duration timeout) {
  try {
    store.leave(Deadline::after(timeout));
  } catch (const Error&) {
    // They have not: the store is broken, and what broke it is under way.
  }
}

std::unique_ptr<ProcessGroup> make_group_without_mpi(const World& world, const GroupOptions& options,
                                                     Clock::duration timeout) {
  auto store = make_tcp_store(world, Deadline::after(timeout));
  if (const std::string lack = lack_of_mpi(world, options); !lack.empty()) {
    // All of them meet, so that one can speak for all.
    store->barrier("meeting the other ranks", Deadline::after(timeout));
    store->leave(Deadline::after(timeout));
    const std::string what = fmt::format("RANK and WORLD_SIZE join processes without MPI, and {}", lack);
    if (world.rank > 0) throw PeerError(static_cast<int>(ExitCode::kUsage), what);
    throw UsageError(what, "start them with mpirun, srun --mpi=pmix or lockstep launch");
  }
  try {
    return make_shm_group(std::move(store), timeout);
  } catch (const DeviceError&) {
    part(*store, timeout);
    throw;
  } catch (const PeerError&) {
    part(*store, timeout);
    throw;
  }
}

}  // namespace

std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options) {
  if (!(options.timeout_seconds > 0 && options.timeout_seconds <= kMostTimeoutSeconds))
    throw UsageError(fmt::format("a timeout of {:g} seconds, where more than 0 and up to {:g} are possible",
                                 options.timeout_seconds, kMostTimeoutSeconds),
                     "--timeout-seconds 300");
  const auto timeout = duration_of(options.timeout_seconds);
  if (world.size == 1) return std::make_unique<SelfGroup>(timeout);
  if (!world.mpi_joins) return make_group_without_mpi(world, options, timeout);
  const bool may_share = world.local_size == world.size && options.progress != Progress::kThread;
  if (options.backend == Backend::kShm || (options.backend != Backend::kMpi && may_share))
    return make_shared_group(world, options, timeout);
  return make_mpi_group(world, options);
}

}  // namespace lockstep::comm
