#include "comm/make_group.h"

#include "base/error.h"
#include "base/log.h"
#include "comm/arena.h"
#include "comm/hosts/host_engine.h"
#include "comm/mpi/mpi_group.h"
#include "comm/shm/peers.h"
#include "comm/shm/shm_engine.h"
#include "comm/store.h"
#include "comm/wait.h"

namespace lockstep::comm {
namespace {

using Backend = GroupOptions::Backend;
using Progress = GroupOptions::Progress;

bool joins_over_tcp(const World& world) { return !world.mpi_joins || world.joins_over_tcp; }

/// Why ranks that have joined over TCP, on `hosts` hosts, cannot have such a group; empty where they can.
std::string lack_of_mpi(const GroupOptions& options, std::size_t hosts) {
  if (options.backend == Backend::kMpi) return "--backend mpi is asked for";
  if (hosts == 1 && options.progress == Progress::kThread)
    return "in shared memory nothing moves on a thread of its own";
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

/// For ranks that have joined: memory on one host, sockets between several.
std::unique_ptr<ProcessGroup> make_own_group(std::unique_ptr<Store>& store, Peers& peers, const World& world,
                                             const GroupOptions& options, Clock::duration timeout) {
  if (peers.hosts().size() == 1 || options.backend == Backend::kShm)
    return make_shm_group(std::move(store), std::move(peers), timeout);
  const bool threaded =
      options.progress == Progress::kThread || (options.progress == Progress::kAuto && options.spare_core);
  Rendezvous rendezvous = world.rendezvous;
  if (!joins_over_tcp(world)) rendezvous.host.clear();
  return make_hosts_group(std::move(store), std::move(peers), rendezvous, timeout, threaded);
}

/// Ranks that MPI joins have proven nothing to each other yet.
void agree_on_encryption(Store& store, const World& world, Deadline deadline) {
  const bool encrypts = world.rendezvous.encrypts;
  const auto all = store.all_gather_text("agreeing on encryption", encrypts ? "1" : "0", deadline);
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw UsageError(fmt::format("rank 0 runs {} --encrypt, and rank {} {} it", all[0] == "1" ? "with" : "without", r,
                                   all[r] == "1" ? "with" : "without"),
                       "give all ranks the same command line and environment");
  if (encrypts && world.rank == 0 && world.rendezvous.secret.empty())
    log_warn(
        "--encrypt: the keys come from random bits that MPI hands out in clear, so who reads its messages at the start "
        "can read all → use lockstep launch, or set {} to the same random text on all hosts (not with mpirun -x)",
        kJobSecretVariable);
}

/// MPI joins the ranks, and carries the data where nothing better can.
std::unique_ptr<ProcessGroup> make_group_over_mpi(const World& world, const GroupOptions& options,
                                                  Clock::duration timeout) {
  auto store = make_mpi_store(world, Deadline::after(timeout));
  Peers peers(*store, Deadline::after(timeout));
  if (peers.hosts().size() > 1) agree_on_encryption(*store, world, Deadline::after(timeout));
  if (options.backend == Backend::kShm) return make_own_group(store, peers, world, options, timeout);
  const auto decline = [&](const Error& error) {
    if (world.rank == 0) log_warn("{}: data goes through MPI, which is slower", error.what());
  };
  try {
    return make_own_group(store, peers, world, options, timeout);
  } catch (const DeviceError& error) {
    if (options.encrypt)
      throw DeviceError(fmt::format("{}; MPI, the other way, does not encrypt (--encrypt)", error.what()),
                        error.remedy());
    decline(error);
  } catch (const PeerError& error) {
    if (options.encrypt || error.code() != static_cast<int>(ExitCode::kDevice)) throw;
    decline(error);
  }
  return make_mpi_group(std::move(store), timeout);
}

std::unique_ptr<ProcessGroup> make_group_over_tcp(const World& world, const GroupOptions& options,
                                                  Clock::duration timeout) {
  auto store = make_tcp_store(world, Deadline::after(timeout));
  Peers peers(*store, Deadline::after(timeout));
  if (const std::string lack = lack_of_mpi(options, peers.hosts().size()); !lack.empty()) {
    // All of them have joined, so one can speak for all.
    store->leave(Deadline::after(timeout));
    const std::string what = fmt::format("RANK and WORLD_SIZE join processes without MPI, and {}", lack);
    if (world.rank > 0) throw PeerError(static_cast<int>(ExitCode::kUsage), what);
    throw UsageError(what, "start them with mpirun, srun --mpi=pmix or lockstep launch");
  }
  try {
    return make_own_group(store, peers, world, options, timeout);
  } catch (const Error&) {
    if (store != nullptr) part(*store, timeout);
    throw;
  }
}

}  // namespace

std::unique_ptr<ProcessGroup> make_group(const World& given, const GroupOptions& options) {
  if (!(options.timeout_seconds > 0 && options.timeout_seconds <= kMostTimeoutSeconds))
    throw UsageError(fmt::format("a timeout of {:g} seconds, where more than 0 and up to {:g} are possible",
                                 options.timeout_seconds, kMostTimeoutSeconds),
                     "--timeout-seconds 300");
  World world = given;
  world.rendezvous.encrypts = options.encrypt;
  if (options.encrypt && options.backend == Backend::kMpi)
    throw UsageError("--encrypt with --backend mpi: MPI does not encrypt what it sends to other hosts",
                     "leave one of them out");
  if (options.encrypt && world.size > 1 && joins_over_tcp(world) && world.rendezvous.secret.empty())
    throw UsageError("--encrypt: this job has no secret that keys could be made of",
                     fmt::format("set {} to the same random text on all ranks (openssl rand -hex 16), or use lockstep "
                                 "launch",
                                 kJobSecretVariable));
  const auto timeout = duration_of(options.timeout_seconds);
  set_stall_warning(duration_of(options.stall_warning_seconds));
  if (world.size == 1) return std::make_unique<SelfGroup>(timeout);
  // Asked for by name, MPI is started even where the ranks could join without it.
  if (options.backend == Backend::kMpi && world.mpi_joins) return make_mpi_group(world, options);
  if (joins_over_tcp(world)) return make_group_over_tcp(world, options, timeout);
  const bool on_one_host = world.local_size == world.size;
  if (on_one_host && options.progress == Progress::kThread && options.backend != Backend::kShm)
    return make_mpi_group(world, options);
  return make_group_over_mpi(world, options, timeout);
}

std::unique_ptr<Arena> SelfGroup::map_arena(std::size_t bytes) { return HostArena::map(bytes); }

}  // namespace lockstep::comm
