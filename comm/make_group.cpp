#include "lockstep/comm/make_group.h"

#include "base/error.h"
#include "base/flight_record.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/backends.h"
#include "comm/mpi/mpi_group.h"
#include "comm/shm/peers.h"
#include "comm/stall.h"
#include "comm/store.h"
#include "comm/subgroup.h"
#include "lockstep/comm/arena.h"
#include "lockstep/comm/device_group.h"

namespace lockstep::comm {
namespace {

using Families = std::vector<const BackendFamily*>;

/// Those that may join the processes, in the order in which they are to be tried.
Families candidates(const BackendFamily* named) {
  if (named != nullptr && named->memory == DeviceKind::kCpu) return {named};
  Families families;
  for (const auto* family : backend_families())
    if (family->memory == DeviceKind::kCpu && family->is_built()) families.push_back(family);
  return families;
}

/// The ranks have agreed that they cannot be a group: none shall take the end of another for what went wrong.
void part(Store& store, Clock::duration timeout) {
  try {
    store.leave(Deadline::after(timeout));
  } catch (const Error&) {
    // They have not: the store is broken, and what broke it is under way.
  }
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
        "--encrypt: the keys come from random bits that MPI sends in clear, so whoever reads its first messages can "
        "read everything → use lockstep launch, or set {} to the same random text on all hosts (not with mpirun -x)",
        kJobSecretVariable);
}

/// All of them have joined, and know the same, so one can speak for all.
[[noreturn]] void refuse(const std::vector<UnsupportedReason>& reasons, const JoinedRanks& ranks) {
  std::vector<std::string> whats;
  for (const auto& reason : reasons) whats.push_back(reason.what);
  if (ranks.options.backend != kAutoBackend)
    whats.push_back(fmt::format("--backend {} is asked for", ranks.options.backend));
  const std::string what = join(whats, ", and ");
  ranks.store->leave(Deadline::after(ranks.timeout()));
  if (ranks.world.rank > 0) throw PeerError(static_cast<int>(ExitCode::kUsage), what);
  throw UsageError(what, reasons.back().remedy);
}

Families usable(const Families& families, const JoinedRanks& ranks) {
  Families usable;
  std::vector<UnsupportedReason> reasons;
  for (const auto* family : families) {
    if (auto reason = family->unsupported(ranks.world, ranks.options, &ranks.peers))
      reasons.push_back(std::move(*reason));
    else
      usable.push_back(family);
  }
  if (usable.empty()) refuse(reasons, ranks);
  return usable;
}

/// `error` is why the ranks could not have the backend before `next`.
void go_on_with(const BackendFamily& next, const Error& error, const JoinedRanks& ranks) {
  if (ranks.options.encrypt && !next.encrypts)
    throw DeviceError(
        fmt::format("{}; {} could replace it, but does not encrypt (--encrypt)", error.what(), next.title),
        error.remedy());
  if (ranks.world.rank == 0) log_warn("{}: data goes through {}, which is slower", error.what(), next.title);
}

std::unique_ptr<ProcessGroup> make_first_of(const Families& families, const JoinedRanks& ranks) {
  for (auto family = families.begin();; ++family) {
    const auto next = family + 1;
    try {
      return (*family)->make(ranks);
    } catch (const DeviceError& error) {
      if (next == families.end()) throw;
      go_on_with(**next, error, ranks);
    } catch (const PeerError& error) {
      if (next == families.end() || ranks.options.encrypt || error.code() != static_cast<int>(ExitCode::kDevice)) throw;
      go_on_with(**next, error, ranks);
    }
  }
}

void check_encryption(const World& world, const GroupOptions& options, const BackendFamily* named) {
  if (!options.encrypt) return;
  if (named != nullptr && named->memory == DeviceKind::kCpu && !named->encrypts)
    throw UsageError(fmt::format("--encrypt with --backend {}: {} does not encrypt what it sends to other hosts",
                                 named->name, named->title),
                     "leave one of them out");
  if (world.size > 1 && world.over_tcp() && world.rendezvous.secret.empty())
    throw UsageError("--encrypt: this job has no secret that keys could be made of",
                     fmt::format("set {} to the same random text on all ranks (openssl rand -hex 16), or use lockstep "
                                 "launch",
                                 kJobSecretVariable));
}

std::unique_ptr<ProcessGroup> join_ranks(const World& world, const GroupOptions& options, const MpiRanks* over) {
  const auto deadline = Deadline::after_seconds(options.timeout_seconds);
  auto store = world.over_tcp() ? make_tcp_store(world, deadline) : make_mpi_store(world, deadline, over);
  try {
    return make_joined_group(world, options, store);
  } catch (const Error&) {
    if (store != nullptr && world.over_tcp()) part(*store, duration_of(options.timeout_seconds));
    throw;
  }
}

World checked(const World& given, const GroupOptions& options) {
  if (!(options.timeout_seconds > 0 && options.timeout_seconds <= kMostTimeoutSeconds))
    throw UsageError(fmt::format("a timeout of {:g} seconds, where more than 0 and up to {:g} are possible",
                                 options.timeout_seconds, kMostTimeoutSeconds),
                     "--timeout-seconds 300");
  World world = given;
  world.rendezvous.encrypts = options.encrypt;
  return world;
}

/// Returns the backend that is named.
const BackendFamily* prepare(const World& world, const GroupOptions& options) {
  const BackendFamily* named = backend_family(options.backend);
  check_encryption(world, options, named);
  set_stall_warning(duration_of(options.stall_warning_seconds));
  return named;
}

/// A group of `given`, which `make` makes where there are several ranks.
std::unique_ptr<ProcessGroup> make_original(
    const World& given, const GroupOptions& options, JobRanks job_ranks,
    FunctionRef<std::unique_ptr<ProcessGroup>(const World&, const BackendFamily* named, const JobRanks&)> make) {
  const World world = checked(given, options);
  if (job_ranks.are_all()) flight::open(world.rank, world.size);
  const BackendFamily* const named = prepare(world, options);
  auto group = world.size == 1 ? std::make_unique<SelfGroup>(duration_of(options.timeout_seconds))
                               : make(world, named, job_ranks);
  GroupOrigin::set(*group, {world, options, std::move(job_ranks)});
  if (flight::phase() == flight::Phase::kStarting) flight::set_phase(flight::Phase::kRunning);
  return group;
}

}  // namespace

std::unique_ptr<Store> make_store(const World& world, Deadline deadline) {
  return world.over_tcp() ? make_tcp_store(world, deadline) : make_mpi_store(world, deadline);
}

std::unique_ptr<ProcessGroup> make_joined_group(const World& world, const GroupOptions& options,
                                                std::unique_ptr<Store>& store, const Subgroup* subgroup) {
  Peers peers(*store, Deadline::after_seconds(options.timeout_seconds),
              subgroup != nullptr && subgroup->oversubscribed);
  if (subgroup == nullptr && !world.over_tcp() && peers.hosts().size() > 1)
    agree_on_encryption(*store, world, Deadline::after_seconds(options.timeout_seconds));
  const JoinedRanks ranks{.world = world, .options = options, .store = store, .peers = peers, .subgroup = subgroup};
  return make_first_of(usable(candidates(backend_family(options.backend)), ranks), ranks);
}

std::unique_ptr<ProcessGroup> make_group_over(const World& given, const GroupOptions& options, JobRanks job_ranks,
                                              const MpiRanks* over) {
  RunningClock::start();
  const auto make = [&](const World& world, const BackendFamily* named, const JobRanks&) {
    for (const auto* family : candidates(named)) {
      if (family->unsupported(world, options, nullptr)) continue;
      if (family->start != nullptr) return family->start(world, options, over);
      break;
    }
    return join_ranks(world, options, over);
  };
  return make_original(given, options, std::move(job_ranks), make);
}

std::unique_ptr<ProcessGroup> make_group_through(
    const World& given, const GroupOptions& options, JobRanks job_ranks,
    FunctionRef<std::unique_ptr<Store>(const World&, const JobRanks&)> join) {
  const auto make = [&](const World& world, const BackendFamily*, const JobRanks& ranks) {
    auto store = join(world, ranks);
    return make_joined_group(world, options, store);
  };
  return make_original(given, options, std::move(job_ranks), make);
}

std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options) {
  return make_group_over(world, options, {}, nullptr);
}

std::unique_ptr<DeviceGroup> make_device_group(ProcessGroup& control, const DeviceGroupOptions& options,
                                               const std::string& backend) {
  const BackendFamily& family = device_backend(backend);
  if (control.size() > 1) return family.make_on_device(control, options);
  DeviceGroupOptions alone = options;
  alone.timeout = options.timeout.value_or(control.timeout());
  return make_device_self_group(alone);
}

std::unique_ptr<ProcessGroup> make_group(const GroupOptions& options) {
  const World world = discover_world(env);
  set_log_identity(world.rank, world.size, host_name());
  return make_group(world, options);
}

std::unique_ptr<Arena> SelfGroup::map_arena(std::size_t bytes) { return HostArena::map(bytes); }

}  // namespace lockstep::comm
