#include "launcher/mpirun_command.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "launcher/job_dir.h"

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

/// Cores that the control groups of this process (version 2) allow; infinity if none sets a quota.
double quota_cores() {
  double cores = std::numeric_limits<double>::infinity();
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    // Every ancestor's quota counts.
    for (std::string group = line.substr(3);; group.resize(group.find_last_of('/'))) {
      std::ifstream file("/sys/fs/cgroup" + group + "/cpu.max");  // "max 100000" or "200000 100000"
      double quota = 0, period = 0;
      if (file >> quota >> period && period > 0) cores = std::min(cores, quota / period);
      if (group.find('/') == std::string::npos) break;
    }
  }
  return cores;
}

bool is_separator(const std::string& argument) {
  return argument.starts_with(':') && argument.find_first_not_of('\\', 1) == std::string::npos;
}

}  // namespace

MpirunCommand mpirun_command(const LaunchOptions& options, const HostFacts& facts, const EnvLookup& lookup) {
  MpirunCommand command;
  command.ranks = options.ranks > 0 ? options.ranks : facts.cores;
  command.oversubscribed = command.ranks > facts.cores;

  command.argv = {facts.mpirun, "--oversubscribe", "--bind-to", "none", "-n", std::to_string(command.ranks),
                  facts.self,   "_rank",           "--"};
  for (const auto& argument : options.program) command.argv.push_back(protect_argument(argument));
  // A bare `lockstep` is this very binary, whether or not some lockstep is in the PATH.
  auto program = command.argv.end() - static_cast<std::ptrdiff_t>(options.program.size());
  if (program != command.argv.end() && *program == "lockstep") *program = facts.self;

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
  // All files of Open MPI lie where the reaper removes them.
  set("OMPI_MCA_orte_tmpdir_base", facts.job_dir);
  for (const char* component : {"btl_vader", "osc_sm", "osc_rdma"})
    set(fmt::format("OMPI_MCA_{}_backing_directory", component), facts.shm_dir);
  // What it takes anyway; looking whether POSIX segments work too, it makes one, and a process that dies then leaves
  // it.
  prefer("OMPI_MCA_shmem", "mmap");
  // Between the steps SIGCONT, SIGTERM and SIGKILL with which mpirun ends a job. Zero would leave the launcher no time
  // to take that over; more would delay it where a rank had not yet started when the first signal came.
  // What it takes anyway; looking whether POSIX segments work too, it makes one, and a process that dies then leaves
  // it.
  prefer("OMPI_MCA_shmem", "mmap");
  set("OMPI_MCA_odls_base_sigkill_timeout", "1");
  // The wrappers' parent-death signal follows the thread that forked them, so mpirun shall not use a pool of threads,
  // which it does for 32 ranks and more.
  set("OMPI_MCA_odls_base_num_threads", "0");
  // Probing for network cards that are not there costs MPI_Init 0.2 s; on one host ob1 is what is used in the end.
  if (!lookup("OMPI_MCA_mtl")) prefer("OMPI_MCA_pml", "ob1");
  // hwloc's look for graphics cards asks for X servers by the name localhost: seconds where no name service answers.
  prefer("HWLOC_COMPONENTS", "-gl");
  if (command.oversubscribed) prefer("OMPI_MCA_mpi_yield_when_idle", "1");

  set(kJobVariable, facts.job_dir);
  set(kLauncherVariable, "unix:" + facts.socket_path);
  set(kBindVariable, name_of(options.bind_to));
  if (facts.tty_columns > 0) set(kTtyVariable, std::to_string(facts.tty_columns));
  return command;
}

std::string protect_argument(std::string argument) { return is_separator(argument) ? argument + '\\' : argument; }

std::string unprotect_argument(std::string argument) {
  if (argument.size() > 1 && is_separator(argument)) argument.pop_back();
  return argument;
}

int usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int count = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0
                        ? CPU_COUNT(&allowed)
                        : static_cast<int>(std::thread::hardware_concurrency());  // more than cpu_set_t has room for
  return std::max(1, static_cast<int>(std::min<double>(count, std::ceil(quota_cores()))));
}

}  // namespace lockstep::launcher
