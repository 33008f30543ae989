#include "launcher/own_ranks.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/network.h"
#include "launcher/hosts/local_addresses.h"
#include "launcher/job_dir.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::launcher {

bool is_own_binary(const std::string& program, const std::string& self) {
  if (program == "lockstep") return true;
  std::string path = program;
  if (program.find('/') == std::string::npos) {
    const auto found = find_program(program);
    if (!found) return false;
    path = *found;
  }
  std::error_code missing;
  return std::filesystem::equivalent(path, self, missing);
}

bool starts_own_ranks(const LaunchOptions& options, const std::string& self, const EnvLookup& lookup) {
  if (options.mpi) return false;
  const bool is_own = is_own_binary(options.program[0], self);
  if (!options.hosts.empty()) return is_own;
  if (!is_own && find_program("mpirun", lookup)) return false;
  constexpr const char* kAllocations[] = {"SLURM_JOB_ID", "SLURM_JOBID",   "PBS_JOBID",  "PBS_NODEFILE",
                                          "LSB_JOBID",    "LOADL_STEP_ID", "PE_HOSTFILE"};
  return std::ranges::none_of(kAllocations, [&](const char* name) { return lookup(name).has_value(); });
}

HeldPort::HeldPort() : address_(loopback_address()) {
  const SocketAddress address = parse_address(address_, 0).value();
  socket_.reset(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  // The option comes after bind(): with it before, the system might choose a port that another one holds so.
  if (!socket_ || ::bind(socket_.get(), address.get(), address.length) != 0 ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0)
    throw DeviceError(fmt::format("launch: no port of {} is free: {}", address_, errno_text(errno)),
                      "end what holds them");
  number_ = own_address(socket_).value().port();
}

namespace {

std::vector<std::string> wrapper_command(const LaunchOptions& options, const HostFacts& facts) {
  const std::string& program = options.program[0];
  std::vector<std::string> argv = {facts.self, "_rank", "--",
                                   is_own_binary(program, facts.self) ? facts.self : program};
  for (std::size_t i = 1; i < options.program.size(); ++i) argv.push_back(protect_argument(options.program[i]));
  return argv;
}

void add_place(const RankPlace& place, Place& variables) {
  variables.emplace_back("RANK", std::to_string(place.rank));
  variables.emplace_back("WORLD_SIZE", std::to_string(place.ranks));
  variables.emplace_back("LOCAL_RANK", std::to_string(place.local_rank));
  variables.emplace_back("LOCAL_WORLD_SIZE", std::to_string(place.local_ranks));
  variables.emplace_back("MASTER_ADDR", place.address);
  if (place.port > 0) variables.emplace_back("MASTER_PORT", std::to_string(place.port));
}

/// Of other launchers, where this one or a helper runs under them, and what is for ranks of mpirun.
const std::vector<std::string> kNotForOwnRanks = {"OMPI_COMM_WORLD_RANK",
                                                  "OMPI_COMM_WORLD_SIZE",
                                                  "OMPI_COMM_WORLD_LOCAL_RANK",
                                                  "OMPI_COMM_WORLD_LOCAL_SIZE",
                                                  "PMIX_RANK",
                                                  "PMI_RANK",
                                                  "PMI_SIZE",
                                                  "TORCHELASTIC_RUN_ID",
                                                  kShmDirVariable,
                                                  kUserTmpVariable,
                                                  "TORCHELASTIC_USE_AGENT_STORE"};

bool on_several(const HostFacts& facts) { return !facts.several.shares.empty(); }

SpawnRequest own_process(const LaunchOptions& options, const HostFacts& facts) {
  SpawnRequest request;
  request.argv = wrapper_command(options, facts);
  request.set_env = job_environment(options, facts, /*on_this_host=*/true);
  request.unset_env = kNotForOwnRanks;
  if (on_several(facts)) {
    request.set_env.emplace_back(kJobIdVariable, facts.several.job_id);
    request.set_env.emplace_back(kHostNameVariable, facts.name);
  } else {
    request.unset_env.insert(request.unset_env.end(), {"LOCKSTEP_LISTEN", kJobIdVariable});
  }
  return request;
}

}  // namespace

SpawnRequest own_rank(const LaunchOptions& options, const HostFacts& facts, const RankPlace& place) {
  SpawnRequest request = own_process(options, facts);
  add_place(place, request.set_env);
  return request;
}

StartRank remote_rank(const LaunchOptions& options, const HostFacts& facts, const RankPlace& place,
                      const EnvLookup& lookup) {
  StartRank start{.rank = place.rank, .argv = wrapper_command(options, facts), .set_env = {}, .unset_env = {}};
  for (const auto& name : facts.several.exported)
    if (const auto value = lookup(name)) start.set_env.emplace_back(name, *value);
  for (auto& variable : job_environment(options, facts, /*on_this_host=*/false))
    start.set_env.push_back(std::move(variable));
  add_place(place, start.set_env);
  start.set_env.emplace_back(kJobIdVariable, facts.several.job_id);
  start.unset_env = kNotForOwnRanks;
  return start;
}

namespace {

pid_t start_here(SpawnRequest request, int output) {
  request.stdout_fd = request.stderr_fd = output;
  const Spawned started = spawn(request);
  if (started.pid < 0)
    throw DeviceError(fmt::format("launch: cannot run {}: {}", request.argv[0], errno_text(started.error)),
                      "check its permissions, and those of the directories above it");
  return started.pid;
}

/// All ranks of a job on this host alone, in their order.
void for_each_own_rank(const LaunchOptions& options, const HeldPort* port,
                       FunctionRef<void(const RankPlace& place)> act) {
  RankPlace place{.ranks = options.ranks, .local_ranks = options.ranks};
  if (port != nullptr) place.address = port->address(), place.port = port->number();
  for (; place.rank < options.ranks; place.local_rank = ++place.rank) act(place);
}

}  // namespace

JobProcesses start_own_ranks(const LaunchOptions& options, const HostFacts& facts, const HeldPort* port, int output) {
  auto processes = JobProcesses::of_wrappers();
  for_each_own_rank(options, port, [&](const RankPlace& place) {
    processes.add(place.rank, start_here(own_rank(options, facts, place), output));
  });
  return processes;
}

pid_t start_spare(const LaunchOptions& options, const HostFacts& facts, int output) {
  SpawnRequest request = own_process(options, facts);
  request.set_env.emplace_back(kSpareVariable, "1");
  request.unset_env.insert(request.unset_env.end(), {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  return start_here(std::move(request), output);
}

namespace {

/// The same of all hosts.
void for_each_rank_on(const GatheredHosts& gathered, const LaunchOptions& options, const HostFacts& facts,
                      FunctionRef<void(std::size_t host, const RankPlace& place)> act) {
  RankPlace place{.ranks = options.ranks, .address = facts.several.address, .port = facts.several.port};
  for (std::size_t i = 0; i < gathered.hosts.size(); ++i) {
    place.local_ranks = gathered.ranks_on[i];
    for (place.local_rank = 0; place.local_rank < place.local_ranks; ++place.local_rank, ++place.rank)
      act(gathered.hosts[i], place);
  }
}

/// What a process that runs would not be started with again: the launcher's terminal is rank 0's, and of another host
/// these are what its helper has set.
Place place_of(Place variables, int rank, bool on_this_host) {
  std::erase_if(variables, [&](const auto& variable) {
    const auto is = [&](const char* name) { return variable.first == name; };
    if (is(kTtyVariable)) return rank != 0;
    return !on_this_host && (is(kJobVariable) || is(kLauncherVariable) || is(kJobSecretVariable) ||
                             is(kHostNameVariable) || is(flight::kDirectoryVariable));
  });
  return variables;
}

/// Of this host: the place of a rank, whose wrapper is started where it is lost.
void replace_here(const LaunchOptions& options, const HostFacts& facts, const RankPlace& place, bool is_lost,
                  int output, Replacements& made) {
  SpawnRequest request = own_rank(options, facts, place);
  made.places.push_back(place_of(request.set_env, place.rank, /*on_this_host=*/true));
  if (is_lost) made.wrappers.emplace_back(place.rank, start_here(std::move(request), output));
}

}  // namespace

Replacements replace_own_ranks(const LaunchOptions& options, const HostFacts& facts, const HeldPort& port,
                               const std::vector<int>& lost, int output) {
  Replacements made;
  for_each_own_rank(options, &port, [&](const RankPlace& place) {
    replace_here(options, facts, place, std::ranges::find(lost, place.rank) != lost.end(), output, made);
  });
  return made;
}

JobProcesses start_ranks_on(const GatheredHosts& gathered, const LaunchOptions& options, const HostFacts& facts,
                            RemoteHosts& hosts, int output) {
  auto processes = JobProcesses::of_wrappers();
  for_each_rank_on(gathered, options, facts, [&](std::size_t host, const RankPlace& place) {
    if (hosts.is_own(host)) {
      processes.add(place.rank, start_here(own_rank(options, facts, place), output));
    } else {
      processes.add_remote(place.rank, host);
      hosts.send(host, remote_rank(options, facts, place, env));
    }
  });
  return processes;
}

Replacements replace_ranks_on(const GatheredHosts& gathered, const LaunchOptions& options, HostFacts& facts,
                              RemoteHosts& hosts, const std::vector<int>& lost, int output) {
  // Elsewhere the one that is there is free again: rank 0 has ended, or has closed it.
  if (hosts.is_own(gathered.hosts.front()) && !env("MASTER_PORT")) facts.several.port = find_free_port();
  Replacements made;
  for_each_rank_on(gathered, options, facts, [&](std::size_t host, const RankPlace& place) {
    const bool is_lost = std::ranges::find(lost, place.rank) != lost.end();
    if (hosts.is_own(host)) return replace_here(options, facts, place, is_lost, output, made);
    const StartRank start = remote_rank(options, facts, place, env);
    made.places.push_back(place_of(start.set_env, place.rank, /*on_this_host=*/false));
    if (!is_lost) return;
    made.remote.emplace_back(place.rank, host);
    hosts.send(host, start);
  });
  return made;
}

}  // namespace lockstep::launcher
