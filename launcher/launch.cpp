#include "launcher/launch.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "launcher/flight_records.h"
#include "launcher/host_needs.h"
#include "launcher/hosts/shared_directory.h"
#include "launcher/own_ranks.h"
#include "launcher/restarts.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

void check(const LaunchOptions& options) {
  check_usage(!options.program.empty(), "launch: no program to start", "lockstep launch -n 2 -- PROGRAM ARGS…");
  if (options.ranks < 0 || options.ranks > kMaxRanks)
    throw UsageError(fmt::format("launch: {} ranks", options.ranks),
                     fmt::format("-n takes 1 to {} or auto", kMaxRanks));
  if (options.grace_seconds && !(*options.grace_seconds >= 0 && *options.grace_seconds <= kMaxGraceSeconds))
    throw UsageError(fmt::format("launch: a grace of {} s", *options.grace_seconds),
                     fmt::format("--grace-seconds takes 0 to {}", kMaxGraceSeconds));
  if (!(options.host_seconds >= kLeastHostSeconds && options.host_seconds <= kMaxHostSeconds))
    throw UsageError(fmt::format("launch: a host timeout of {} s", options.host_seconds),
                     fmt::format("--host-timeout-seconds takes {} to {}", kLeastHostSeconds, kMaxHostSeconds));
  if (options.max_restarts < 0 || options.max_restarts > kMaxRestarts)
    throw UsageError(fmt::format("launch: {} restarts", options.max_restarts),
                     fmt::format("--max-restarts takes 0 to {}", kMaxRestarts));
  if (options.min_ranks && options.max_restarts == 0)
    throw UsageError("launch: --min-ranks without --max-restarts: a job that is not restarted keeps its ranks",
                     "add --max-restarts K, or leave --min-ranks out");
  if (options.in_place && options.max_restarts == 0)
    throw UsageError("launch: --in-place without --max-restarts: a job that is not restarted needs no survivors",
                     "add --max-restarts K, or leave --in-place out");
  if (const auto seconds = options.host_return_seconds) {
    if (!(*seconds >= 0 && *seconds <= kMaxHostReturnSeconds))
      throw UsageError(fmt::format("launch: a wait of {} s for hosts", *seconds),
                       fmt::format("--host-return-seconds takes 0 to {}", kMaxHostReturnSeconds));
    if (options.max_restarts == 0 || options.hosts.empty())
      throw UsageError("launch: --host-return-seconds is for jobs on several hosts that are restarted",
                       "add --max-restarts K and --hosts a:4,b:4, or leave it out");
  }
  if (env("OMPI_COMM_WORLD_RANK"))
    throw UsageError("launch: this process is itself a rank of an MPI job",
                     "start `lockstep launch` outside of mpirun");
}

std::size_t widest_name(const RemoteHosts& hosts) {
  std::size_t widest = 0;
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (hosts.is_there(i)) widest = std::max(widest, hosts.name(i).size());
  return widest;
}

/// What the user calls this host, or the system's name for it.
std::string own_name(const RemoteHosts& hosts) {
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (hosts.is_own(i)) return hosts.name(i);
  return host_name();
}

/// Rank 0 reads and writes checkpoints, on whichever host it is after a restart.
void warn_of_own_disks(const LaunchOptions& options, RemoteHosts& hosts, GatheredHosts& gathered,
                       SignalQueue& signals) {
  if (options.checkpoint_dir.empty() || gathered.hosts.size() < 2) return;
  const auto blind = hosts_that_do_not_see(options.checkpoint_dir, hosts, gathered, signals);
  if (blind.empty()) return;
  const std::string& first = hosts.name(gathered.hosts.front());
  gathered.warnings.push_back(
      fmt::format("warning: {} {} the checkpoints in {} of host {}: if that is lost, the job cannot resume there → put "
                  "--checkpoint-dir on a file system that all hosts share",
                  blind.size() == 1 ? "host " + blind[0] : "hosts " + join(blind, ", "),
                  blind.size() == 1 ? "does not see" : "do not see", options.checkpoint_dir, first));
}

HostFacts facts_of_this_host(const LaunchOptions& options) {
  HostFacts facts;
  check_proc();
  facts.cores = usable_cores();
  facts.is_root = ::geteuid() == 0;
  facts.self = std::filesystem::read_symlink("/proc/self/exe").string();
  const bool own = starts_own_ranks(options, facts.self, env);
  if (options.hosts.empty()) check_open_files(options.ranks > 0 ? options.ranks : facts.cores, !own);
  if (options.in_place && !own)
    throw UsageError(fmt::format("launch: --in-place: mpirun starts the ranks of {}, and ends all when one does",
                                 options.program[0]),
                     "leave --in-place out, or start lockstep itself without --mpi");
  if (own) return facts;
  check_mpiruns_loopback();
  const auto mpirun = find_program("mpirun");
  if (!mpirun) throw MpiError("launch: there is no mpirun in PATH", "install Open MPI (Debian: openmpi-bin)");
  facts.mpirun = *mpirun;
  return facts;
}

}  // namespace

int launch(LaunchOptions options) {
  check(options);
  open_standard_fds();
  HostFacts facts = facts_of_this_host(options);
  // From here on a stop is a matter of whoever waits, and the order of destruction is that of the clean-up.
  std::vector<int> stops = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
  if (!options.hosts.empty()) stops.push_back(SIGTSTP);
  SignalQueue signals(stops);

  RemoteHosts hosts;
  GatheredHosts gathered;
  if (!options.hosts.empty()) {
    hosts = call_hosts(options, facts.self, facts.cores, signals, gathered.exit_code);
    if (gathered.exit_code == 0) gathered = gather_hosts(hosts, options, signals);
    if (gathered.exit_code != 0) return gathered.exit_code;
    options.ranks = gathered.ranks;
    facts.name = own_name(hosts);
    if (options.max_restarts > 0) {
      hosts.keep_calling();
      warn_of_own_disks(options, hosts, gathered, signals);
    }
  }
  if (options.ranks == 0) options.ranks = facts.cores;
  if (options.min_ranks && (*options.min_ranks < 1 || *options.min_ranks > options.ranks))
    throw UsageError(fmt::format("launch: --min-ranks {} of {} ranks", *options.min_ranks, options.ranks),
                     fmt::format("--min-ranks takes 1 to {}", options.ranks));
  RankLogs logs(options.log_dir, options.ranks);
  if (!options.log_dir.empty()) remove_flights(options.log_dir);
  Console console(options.ranks, !options.no_prefix, STDOUT_FILENO, STDERR_FILENO, widest_name(hosts));
  facts.tty_columns = console.live_columns();
  facts.tty_prefix = console.prefix_columns();
  if (facts.tty_columns > 0) facts.tty_path = console.terminal();
  if (facts.mpirun.empty() && options.hosts.empty() && !is_own_binary(options.program[0], facts.self))
    console.say(
        fmt::format("warning: there is no mpirun in PATH, so the ranks of {} are started without it: lockstep's groups "
                    "join them, MPI_Init does not → install Open MPI (Debian: openmpi-bin) for programs that call it",
                    options.program[0]));
  for (const auto& warning : gathered.warnings) console.say(warning);
  if (gathered.several.shares.empty() && gathered.warnings.empty() && options.ranks > facts.cores)
    console.say(fmt::format("warning: {} ranks share {} core{}, so they yield while they wait: slow, but right",
                            options.ranks, facts.cores, facts.cores == 1 ? "" : "s"));

  RestartHistory history;
  if (options.max_restarts > 0 && !options.log_dir.empty()) history = RestartHistory(options.log_dir);
  return run_attempts(options, facts, std::move(gathered), {hosts, console, logs, signals, history});
}

}  // namespace lockstep::launcher
