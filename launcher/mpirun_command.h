// Which mpirun command line and environment start a job: a pure function of the options and of facts about the host.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "launcher/options.h"

namespace lockstep::launcher {

/// Variables that the launcher sets for the ranks. LOCKSTEP_TTY is there only when the launcher writes to a terminal,
/// and only rank 0 keeps it: the columns that a progress bar, redrawn with '\r' on stdout or stderr, may fill.
inline constexpr const char* kLauncherVariable = "LOCKSTEP_LAUNCHER";  // unix:/path of the launcher's socket
inline constexpr const char* kBindVariable = "LOCKSTEP_BIND";          // core, socket or none
inline constexpr const char* kTtyVariable = "LOCKSTEP_TTY";

struct HostFacts {
  int cores = 1;  // that this process may use
  bool is_root = false;
  std::string mpirun;  // full path
  std::string self;    // full path of the running binary
  std::string job_dir;
  std::string shm_dir;
  std::string socket_path;  // of the launcher
  int tty_columns = 0;      // for rank 0's progress bar; 0: no terminal
};

struct MpirunCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> set_env;
  int ranks = 1;
  bool oversubscribed = false;  // more ranks than cores
};

/// `lookup` reads the present environment: settings of Open MPI that the user made there are left alone, except for
/// those on which cleaning up depends.
MpirunCommand mpirun_command(const LaunchOptions& options, const HostFacts& facts, const EnvLookup& lookup);

/// mpirun takes an argument ":" of the program for its own separator of programs, so none of them may be one.
std::string protect_argument(std::string argument);
std::string unprotect_argument(std::string argument);

/// Cores in this process's affinity mask, bounded by the CPU quota of its control group (`docker run --cpus`).
int usable_cores();

}  // namespace lockstep::launcher
