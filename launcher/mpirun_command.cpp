#include "launcher/mpirun_command.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/flight_record.h"
#include "base/resource_limits.h"
#include "launcher/job_dir.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::launcher {
namespace {

const char* name_of(BindTo bind_to) {
  switch (bind_to) {
    case BindTo::kCore: return "core";
    case BindTo::kSocket: return "socket";
    case BindTo::kNone: return "none";
  }
  return "none";
}

bool is_separator(const std::string& argument) {
  return argument.starts_with(':') && argument.find_first_not_of('\\', 1) == std::string::npos;
}

/// The environment in which mpirun starts its daemons through the launcher and asks no scheduler for hosts.
void span_hosts(const HostFacts& facts, const EnvLookup& lookup, MpirunCommand& command) {
  const SeveralHosts& several = facts.several;
  const auto set = [&](const std::string& name, const std::string& value) {
    command.set_env.emplace_back(name, value);
  };
  set(kShmDirVariable, facts.shm_dir);
  set(kHostNameVariable, facts.name);
  set(kJobIdVariable, several.job_id);
  set("MASTER_ADDR", several.address);
  set("MASTER_PORT", std::to_string(several.port));

  set("OMPI_MCA_plm", "rsh");
  set("OMPI_MCA_ras", "^slurm,tm,gridengine,loadleveler,lsf");
  set("OMPI_MCA_plm_rsh_agent", several.agent + " _rsh");
  for (const char* name : {"disable_qrsh", "disable_llspawn", "no_tree_spawn"})
    set(fmt::format("OMPI_MCA_plm_rsh_{}", name), "1");
  // Hosts have the names that the user gives them.
  set("OMPI_MCA_orte_keep_fqdn_hostnames", "1");
  // All daemons stay connected for as long as they live.
  set("OMPI_MCA_orte_leave_session_attached", "1");
  set("OMPI_MCA_plm_rsh_num_concurrent", std::to_string(several.shares.size() + 1));
  for (const char* name : {"OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_tmpdir_base",
                           "OMPI_MCA_orte_local_tmpdir_base", "OMPI_MCA_orte_remote_tmpdir_base"})
    command.unset_env.emplace_back(name);
  // For its daemons, and for ranks that use MPI.
  for (const char* layer : {"oob_tcp", "btl_tcp"}) {
    const std::string include = fmt::format("OMPI_MCA_{}_if_include", layer);
    const std::string exclude = fmt::format("OMPI_MCA_{}_if_exclude", layer);
    if (lookup(include) || lookup(exclude)) continue;
    if (!several.networks.empty()) {
      set(include, several.networks);
    } else if (!several.not_networks.empty()) {
      set(exclude, "127.0.0.1/8," + several.not_networks);
    }
  }
}

/// mpirun's flags that place the ranks and take variables along.
std::vector<std::string> host_flags(const HostFacts& facts) {
  // By slot it would take the hosts in another order: its own host comes first.
  std::vector<std::string> flags = {"--hostfile", facts.several.hostfile, "--map-by", "seq"};
  std::vector<std::string> names = {kJobIdVariable, "MASTER_ADDR",    "MASTER_PORT",
                                    kBindVariable,  kAttemptVariable, kCheckpointStepVariable};
  if (!facts.restart_cause.empty()) names.emplace_back(kRestartCauseVariable);
  if (facts.tty_columns > 0) names.emplace_back(kTtyVariable);
  names.insert(names.end(), facts.several.exported.begin(), facts.several.exported.end());
  for (const auto& name : names) flags.insert(flags.end(), {"-x", name});
  return flags;
}

void set_environment(const LaunchOptions& options, const HostFacts& facts, bool several, const EnvLookup& lookup,
                     MpirunCommand& command) {
  const auto set = [&](const std::string& name, const std::string& value) {
    command.set_env.emplace_back(name, value);
  };
  const auto prefer = [&](const std::string& name, const std::string& value) {
    if (!lookup(name)) set(name, value);
  };
  if (facts.is_root) {
    prefer("OMPI_ALLOW_RUN_AS_ROOT", "1");
    prefer("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  // All files of Open MPI lie where the reaper removes them. With daemons elsewhere its own parameter would reach them
  // too, and fix one place for all; the helpers give them theirs.
  if (several) {
    set(kUserTmpVariable, lookup("TMPDIR").value_or(""));
    set("TMPDIR", facts.job_dir);
  } else {
    set("OMPI_MCA_orte_tmpdir_base", facts.job_dir);
  }
  for (const char* component : kMemoryFilesOf)
    set(fmt::format("OMPI_MCA_{}_backing_directory", component), facts.shm_dir);
  // What it takes anyway; looking whether POSIX segments work too, it makes one, and a process that dies then leaves
  // it.
  prefer("OMPI_MCA_shmem", "mmap");
  // Between the steps SIGCONT, SIGTERM and SIGKILL with which mpirun ends a job. Zero would leave the launcher no time
  // to take that over; more would delay it where a rank had not yet started when the first signal came.
  set("OMPI_MCA_odls_base_sigkill_timeout", "1");
  // The wrappers' parent-death signal follows the thread that forked them, so mpirun shall not use a pool of threads,
  // which it does for 32 ranks and more.
  set("OMPI_MCA_odls_base_num_threads", "0");
  // Probing for network cards that are not there costs MPI_Init 0.2 s; on one host ob1 is what is used in the end.
  if (!several && !lookup("OMPI_MCA_mtl")) prefer("OMPI_MCA_pml", "ob1");
  // Ranks of one host share memory; for other ways, which they do not take, each would listen at addresses of the host.
  if (!several) prefer("OMPI_MCA_btl", "self,vader");
  // hwloc's look for graphics cards asks for X servers by the name localhost: seconds where no name service answers.
  prefer("HWLOC_COMPONENTS", "-gl");
  if (command.oversubscribed) prefer("OMPI_MCA_mpi_yield_when_idle", "1");
  // For this host's ranks. mpirun passes on to others what host_flags() names, in clear: there the helpers set it.
  for (const auto& [name, value] : job_environment(options, facts, /*on_this_host=*/!several)) set(name, value);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> job_environment(const LaunchOptions& options, const HostFacts& facts,
                                                                 bool on_this_host) {
  std::vector<std::pair<std::string, std::string>> variables = {
      {kJobVariable, facts.job_dir},
      {kLauncherVariable, "unix:" + facts.socket_path},
      {kJobSecretVariable, facts.secret},
      {kBindVariable, name_of(options.bind_to)},
      {kAttemptVariable, std::to_string(facts.attempt)},
      {kCheckpointStepVariable, std::to_string(facts.checkpoint_step)}};
  if (options.in_place) variables.emplace_back(kInPlaceVariable, "1");
  if (!facts.restart_cause.empty()) variables.emplace_back(kRestartCauseVariable, facts.restart_cause);
  if (!facts.flight_dir.empty()) variables.emplace_back(flight::kDirectoryVariable, facts.flight_dir);
  if (facts.tty_columns > 0) {
    const bool resized = on_this_host && !facts.tty_path.empty();
    variables.emplace_back(kTtyVariable,
                           resized ? fmt::format("{} {} {}", facts.tty_columns, facts.tty_prefix, facts.tty_path)
                                   : std::to_string(facts.tty_columns));
  }
  return variables;
}

MpirunCommand mpirun_command(const LaunchOptions& options, const HostFacts& facts, const EnvLookup& lookup) {
  MpirunCommand command;
  command.ranks = options.ranks > 0 ? options.ranks : facts.cores;
  const bool several = !facts.several.shares.empty();
  command.oversubscribed = several ? facts.several.oversubscribed : command.ranks > facts.cores;

  command.argv = {facts.mpirun, "--oversubscribe", "--bind-to", "none", "-n", std::to_string(command.ranks)};
  if (several)
    for (auto& flag : host_flags(facts)) command.argv.push_back(std::move(flag));
  command.argv.insert(command.argv.end(), {facts.self, "_rank", "--"});
  for (const auto& argument : options.program) command.argv.push_back(protect_argument(argument));
  // A bare `lockstep` is this very binary, whether or not some lockstep is in the PATH.
  auto program = command.argv.end() - static_cast<std::ptrdiff_t>(options.program.size());
  if (program != command.argv.end() && *program == "lockstep") *program = facts.self;

  set_environment(options, facts, several, lookup, command);
  if (several) span_hosts(facts, lookup, command);
  return command;
}

std::string hostfile_text(const SeveralHosts& several) {
  std::string text;
  for (const auto& share : several.shares)
    for (int i = 0; i < share.ranks; ++i) text += share.name + "\n";
  return text;
}

bool goes_along(const std::string& name) {
  constexpr const char* kOwn[] = {kJobVariable,          kLauncherVariable, kBindVariable,    kTtyVariable,
                                  kShmDirVariable,       kHostNameVariable, kJobIdVariable,   kUserTmpVariable,
                                  kJobSecretVariable,    kPreloadVariable,  kAttemptVariable, kCheckpointStepVariable,
                                  kRestartCauseVariable, kInPlaceVariable,  kSpareVariable};
  if (std::ranges::any_of(kOwn, [&](const char* own) { return name == own; })) return false;
  constexpr const char* kPrefixes[] = {"LOCKSTEP", "NCCL_", "OMP_", "ONEDNN_", "DNNL_", "UCX_", "FI_"};
  return std::ranges::any_of(kPrefixes, [&](const char* prefix) { return name.starts_with(prefix); });
}

std::string protect_argument(const std::string& argument) {
  return is_separator(argument) ? argument + '\\' : argument;
}

std::string unprotect_argument(std::string argument) {
  if (argument.size() > 1 && is_separator(argument)) argument.pop_back();
  return argument;
}

int usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int count = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0
                        ? CPU_COUNT(&allowed)
                        : static_cast<int>(std::thread::hardware_concurrency());  // more than a cpu_set_t holds
  return threads_within(cpu_quota(), count);
}

}  // namespace lockstep::launcher
