#include "launcher/attempt.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "launcher/flight_records.h"
#include "launcher/job_dir.h"
#include "launcher/loopback/preload.h"
#include "launcher/own_ranks.h"
#include "launcher/supervisor.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

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

JobProcesses start_mpirun(const MpirunCommand& command, const HostFacts& facts, const LoopbackPreload* preload,
                          int output) {
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
  return JobProcesses::of_mpirun(started.pid);
}

/// What has to live as long as the ranks do, and what starts them.
class Starter {
 public:
  Starter(const LaunchOptions& options, const HostFacts& facts, bool on_this_host)
      : own_(starts_own_ranks(options, facts.self, env)), here_(on_this_host) {
    if (!here_) return;
    if (own_) {
      if (options.ranks > 1) port_.emplace();
    } else {
      preload_.emplace();
    }
  }
  JobProcesses start(const LaunchOptions& options, const GatheredHosts& gathered, HostFacts& facts, RemoteHosts& hosts,
                     int output) {
    if (own_ && here_) return start_own_ranks(options, facts, port_ ? &*port_ : nullptr, output);
    if (own_) return start_ranks_on(gathered, options, facts, hosts, output);
    if (!preload_) prepare_mpirun(facts);
    return start_mpirun(mpirun_command(options, facts, env), facts, preload_ ? &*preload_ : nullptr, output);
  }
  /// Of own ranks: others in the place of `lost`, which all connect anew.
  Replacements replace(const LaunchOptions& options, const GatheredHosts& gathered, HostFacts& facts,
                       RemoteHosts& hosts, const std::vector<int>& lost, int output) {
    if (!here_) return replace_ranks_on(gathered, options, facts, hosts, lost, output);
    port_.emplace();
    return replace_own_ranks(options, facts, *port_, lost, output);
  }
  const char* name() const { return own_ ? "wrapper" : "mpirun"; }

 private:
  bool own_, here_;
  std::optional<HeldPort> port_;  // of more than one rank
  std::optional<LoopbackPreload> preload_;
};

/// Open MPI's banners and comments, without the lines of dashes and blanks; or the errors of wrappers.
std::vector<std::string> lines_of_starter(const std::string& path, const char* name) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.find_first_not_of("- \t\r") != std::string::npos) lines.push_back(fmt::format("{}: {}", name, line));
  return lines;
}

/// Keeps the records, too, where there are logs.
void describe_flights(const JobContext& context, const JobReport& report, const std::string& directory,
                      std::vector<RankFlight> flights, AttemptResult& result) {
  gather_flights(report.ranks, directory, flights);
  const auto rank = result.root_cause.rank;
  result.flight_lines = describe_flights(report, result.root_cause, flights,
                                         rank ? context.logs.last_lines(*rank) : std::vector<std::string>());
  const std::string& log_dir = context.options.log_dir;
  if (log_dir.empty() || report.interrupted_by != 0) return;
  remove_flights(log_dir);
  if (const auto failure = keep_flights(flights, log_dir); !failure.empty()) context.console.say(failure);
}

}  // namespace

void run_attempt(const JobContext& context, HostFacts facts, const GatheredHosts& gathered,
                 FunctionRef<void(const AttemptResult&)> conclude) {
  const LaunchOptions& options = context.options;
  const JobDir job(job_tmp_base(), job_shm_base(gathered.hosts.empty() ? options.ranks : gathered.own_ranks));
  RunningClock::start();
  facts.several = gathered.several;
  facts.job_dir = job.path();
  facts.shm_dir = job.shm_path();
  facts.socket_path = job.path() + "/launcher";
  const auto users = env(flight::kDirectoryVariable);
  facts.flight_dir = users && !users->empty() ? *users : job.shm_path() + "/flight";
  const JobSecret secret = gathered.secret.empty() ? JobSecret::random() : gathered.secret;
  facts.secret = secret.text();
  AuthenticatedListener listener = listen_for_job(facts.socket_path, secret, options.ranks);
  const std::string log = job.path() + "/starter.log";
  const UniqueFd output(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  check_system(bool(output), "opening " + log);

  RemoteHosts& hosts = context.hosts;
  Starter starter(options, facts, gathered.several.shares.empty());
  JobProcesses processes = starter.start(options, gathered, facts, hosts, output.get());
  Supervisor supervisor(std::move(listener), std::move(processes), options.ranks, options.grace_seconds,
                        context.console, context.logs, context.signals, hosts,
                        gathered.hosts.empty() ? "" : facts.name);
  supervisor.on_checkpoint(context.on_checkpoint);
  supervisor.on_first_step(context.on_first_step);
  if (options.in_place)
    supervisor.on_survivors(
        [&](const Loss& loss) -> std::optional<Replacements> {
          if (!context.on_survivors(loss, facts)) return std::nullopt;
          return starter.replace(options, gathered, facts, hosts, loss.to_start, output.get());
        },
        gathered.hosts.empty() ? [&] { return start_spare(options, facts, output.get()); } : std::function<pid_t()>());
  supervisor.on_starter_output([&](std::string_view bytes) {
    [[maybe_unused]] const auto written = ::write(output.get(), bytes.data(), bytes.size());
  });
  supervisor.run();
  JobReport report = supervisor.report();
  for (const auto& lost : report.lost_hosts)
    for (const auto& directory : lost.directories) remove_stale_dirs(directory, gathered.token);
  report.program = options.program[0];
  AttemptResult result{.root_cause = find_root_cause(report),
                       .flight_lines = {},
                       .starter_lines = {},
                       .requested = report.interrupted_by != 0 || report.stop_asked,
                       .growing = report.growing && report.lost_hosts.empty(),
                       .host_lost = !report.lost_hosts.empty(),
                       .progress = report.progress,
                       .started_at = report.started_at,
                       .failed_at = report.failed_at};
  if (!result.root_cause.line.empty())
    describe_flights(context, report, facts.flight_dir, supervisor.take_flights(), result);
  if (result.root_cause.show_mpirun) result.starter_lines = lines_of_starter(log, starter.name());
  conclude(result);
  supervisor.flush_console();
}

}  // namespace lockstep::launcher
