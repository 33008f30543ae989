#include "launcher/launch.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "launcher/console.h"
#include "launcher/hosts/gather.h"
#include "launcher/job_dir.h"
#include "launcher/loopback/preload.h"
#include "launcher/mpirun_command.h"
#include "launcher/process.h"
#include "launcher/supervisor.h"
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
  if (env("OMPI_COMM_WORLD_RANK"))
    throw UsageError("launch: this process is itself a rank of an MPI job",
                     "start `lockstep launch` outside of mpirun");
}

/// Open MPI's banners and comments, without the lines of dashes and blanks.
void say_what_mpirun_wrote(const std::string& path, Console& console) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.find_first_not_of("- \t\r") != std::string::npos) console.say("mpirun: " + line);
}

std::size_t widest_name(const std::vector<HostSpec>& hosts) {
  std::size_t widest = 0;
  for (const auto& host : hosts) widest = std::max(widest, host.name.size());
  return widest;
}

/// The files with which mpirun finds the hosts, and this binary under a name without blanks.
void prepare_mpirun(HostFacts& facts) {
  facts.several.hostfile = facts.job_dir + "/hosts";
  facts.several.agent = facts.job_dir + "/lockstep";
  std::ofstream file(facts.several.hostfile);
  file << hostfile_text(facts.several) << std::flush;
  check_system(bool(file) && ::symlink(facts.self.c_str(), facts.several.agent.c_str()) == 0,
               "writing to " + facts.job_dir);
  // Daemons on other hosts get the agent's path too, and look whether it exists: this binary does, at the same path.
  if (facts.self.find_first_of(" \t") == std::string::npos) facts.several.agent = facts.self;
}

void explain(const RootCause& root_cause, const RankLogs& logs, const std::string& mpirun_log, Console& console) {
  console.say(root_cause.line);
  if (root_cause.rank) {
    const auto lines = logs.last_lines(*root_cause.rank);
    if (!lines.empty()) console.say(fmt::format("the last lines of rank {}:", *root_cause.rank));
    for (const auto& line : lines) console.say("  | " + line);
    if (const auto path = logs.path(*root_cause.rank); !path.empty()) console.say("its log is " + path);
  }
  if (root_cause.show_mpirun) say_what_mpirun_wrote(mpirun_log, console);
}

HostFacts facts_of_this_host() {
  HostFacts facts;
  const auto mpirun = find_program("mpirun");
  if (!mpirun) throw MpiError("launch: there is no mpirun in PATH", "install Open MPI (Debian: openmpi-bin)");
  facts.mpirun = *mpirun;
  facts.cores = usable_cores();
  facts.is_root = ::geteuid() == 0;
  facts.self = std::filesystem::read_symlink("/proc/self/exe").string();
  return facts;
}

Spawned start_mpirun(const MpirunCommand& command, const HostFacts& facts, const LoopbackPreload* preload, int output) {
  SpawnRequest request;
  request.argv = command.argv;
  request.set_env = command.set_env;
  request.unset_env = command.unset_env;
  if (preload != nullptr)
    for (auto& variable : preload->environment(env)) request.set_env.push_back(std::move(variable));
  request.stdout_fd = request.stderr_fd = output;
  const Spawned started = spawn(request);
  if (started.pid < 0)
    throw MpiError(fmt::format("launch: cannot run {}: {}", facts.mpirun, errno_text(started.error)),
                   "check the installation of Open MPI");
  return started;
}

/// The job's exit code, where its output could be written; else what became of that.
int with_lost_output(int exit_code, Console& console) {
  // The programs may have ended before it was noticed that nobody reads what they wrote.
  if (exit_code == 0 && console.queues().front().error() == EPIPE) {
    console.say(kNoReader);
    exit_code = 128 + SIGPIPE;
  }
  for (const auto& queue : console.queues()) {
    if (queue.error() == 0 || queue.error() == EPIPE) continue;
    console.say(fmt::format("output was lost: {}", errno_text(queue.error())));
    if (exit_code == 0) exit_code = static_cast<int>(ExitCode::kData);
  }
  return exit_code;
}

}  // namespace

int launch(LaunchOptions options) {
  check(options);
  open_standard_fds();
  HostFacts facts = facts_of_this_host();
  // From here on a stop is a matter of whoever waits, and the order of destruction is that of the clean-up.
  std::vector<int> stops = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
  if (!options.hosts.empty()) stops.push_back(SIGTSTP);
  SignalQueue signals(stops);

  GatheredHosts gathered;
  if (!options.hosts.empty()) {
    gathered = gather_hosts(options, facts.self, facts.cores, signals);
    if (gathered.exit_code != 0) return gathered.exit_code;
    options.ranks = gathered.ranks;
    facts.several = std::move(gathered.several);
    facts.name = gathered.own_name;
  }
  const int ranks = options.ranks > 0 ? options.ranks : facts.cores;
  RankLogs logs(options.log_dir, ranks);
  Console console(ranks, !options.no_prefix, STDOUT_FILENO, STDERR_FILENO, widest_name(gathered.hosts));
  facts.tty_columns = console.live_columns();
  for (const auto& warning : gathered.warnings) console.say(warning);

  const JobDir job(job_tmp_base(), job_shm_base(gathered.ranks_on.empty() ? ranks : gathered.own_ranks));
  facts.job_dir = job.path();
  facts.shm_dir = job.shm_path();
  facts.socket_path = job.path() + "/launcher";
  const JobSecret secret = gathered.secret.empty() ? JobSecret::random() : gathered.secret;
  facts.secret = secret.text();
  AuthenticatedListener listener(listen_at(facts.socket_path), secret, ranks);
  if (!gathered.links.empty()) prepare_mpirun(facts);
  const std::string mpirun_log = job.path() + "/mpirun.log";
  UniqueFd mpirun_output(::open(mpirun_log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  check_system(bool(mpirun_output), "opening " + mpirun_log);

  const MpirunCommand command = mpirun_command(options, facts, env);
  if (command.oversubscribed && gathered.warnings.empty())
    console.say(fmt::format("warning: {} ranks share {} core{}, so they yield while they wait: slow, but right",
                            command.ranks, facts.cores, facts.cores == 1 ? "" : "s"));
  const LoopbackPreload preload;
  const Spawned started =
      start_mpirun(command, facts, gathered.links.empty() ? &preload : nullptr, mpirun_output.get());

  RemoteHosts hosts(std::move(gathered.links), duration_of(options.host_seconds));
  Supervisor supervisor(std::move(listener), started.pid, ranks, options.grace_seconds, console, logs, signals, hosts,
                        gathered.hosts.empty() ? "" : facts.name);
  supervisor.run();
  JobReport report = supervisor.report();
  for (const auto& lost : report.lost_hosts)
    for (const auto& directory : lost.directories) remove_stale_dirs(directory, gathered.token);
  report.program = options.program[0];
  const RootCause root_cause = find_root_cause(report);
  if (!root_cause.line.empty()) explain(root_cause, logs, mpirun_log, console);
  const int exit_code = with_lost_output(root_cause.exit_code, console);
  supervisor.flush_console();
  return exit_code;
}

}  // namespace lockstep::launcher
