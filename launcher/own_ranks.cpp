#include "launcher/own_ranks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/error.h"

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
  if (options.mpi || !options.hosts.empty() || !is_own_binary(options.program[0], self)) return false;
  constexpr const char* kAllocations[] = {"SLURM_JOB_ID", "SLURM_JOBID",   "PBS_JOBID",  "PBS_NODEFILE",
                                          "LSB_JOBID",    "LOADL_STEP_ID", "PE_HOSTFILE"};
  return std::ranges::none_of(kAllocations, [&](const char* name) { return lookup(name).has_value(); });
}

HeldPort::HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int yes = 1;
  // The option comes after bind(): with it before, the system might choose a port that another one holds so.
  if (!socket_ || ::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw DeviceError("launch: no port of 127.0.0.1 is free: " + errno_text(errno), "end what holds them");
  number_ = ntohs(address.sin_port);
}

SpawnRequest own_rank(const LaunchOptions& options, const HostFacts& facts, int rank, int ranks, int port) {
  SpawnRequest request;
  request.argv = {facts.self, "_rank", "--", facts.self};
  for (std::size_t i = 1; i < options.program.size(); ++i) request.argv.push_back(protect_argument(options.program[i]));
  request.set_env = job_environment(options, facts);
  for (const char* name : {"RANK", "LOCAL_RANK"}) request.set_env.emplace_back(name, std::to_string(rank));
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) request.set_env.emplace_back(name, std::to_string(ranks));
  request.set_env.emplace_back("MASTER_ADDR", "127.0.0.1");
  request.set_env.emplace_back("MASTER_PORT", std::to_string(port));
  // Of other launchers, where this one runs under them, and what is for ranks of several hosts.
  request.unset_env = {"OMPI_COMM_WORLD_SIZE",
                       "OMPI_COMM_WORLD_LOCAL_RANK",
                       "OMPI_COMM_WORLD_LOCAL_SIZE",
                       "PMIX_RANK",
                       "PMI_RANK",
                       "PMI_SIZE",
                       "TORCHELASTIC_RUN_ID",
                       "TORCHELASTIC_USE_AGENT_STORE",
                       "LOCKSTEP_LISTEN",
                       kJobIdVariable,
                       kShmDirVariable,
                       kUserTmpVariable};
  return request;
}

JobProcesses start_own_ranks(const LaunchOptions& options, const HostFacts& facts, int ranks, const HeldPort& port,
                             int output) {
  auto processes = JobProcesses::of_wrappers();
  for (int rank = 0; rank < ranks; ++rank) {
    SpawnRequest request = own_rank(options, facts, rank, ranks, port.number());
    request.stdout_fd = request.stderr_fd = output;
    const Spawned started = spawn(request);
    if (started.pid < 0)
      throw DeviceError(fmt::format("launch: cannot run {}: {}", facts.self, errno_text(started.error)));
    processes.add(started.pid);
  }
  return processes;
}

}  // namespace lockstep::launcher
