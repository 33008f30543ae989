// Which mpirun command line and environment start a job: a pure function of the options and of facts about the host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/options.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

/// Variables that the launcher sets for the ranks. LOCKSTEP_TTY is there only when the launcher writes to a terminal,
/// and only rank 0 keeps it: the columns that a progress bar, redrawn with '\r' on stdout or stderr, may fill. On the
/// launcher's host, "COLUMNS PREFIX PATH": as the terminal at PATH is resized, it may fill all columns but PREFIX.
inline constexpr const char* kLauncherVariable = "LOCKSTEP_LAUNCHER";  // unix:/path of the launcher's socket
inline constexpr const char* kBindVariable = "LOCKSTEP_BIND";          // core, socket or none
inline constexpr const char* kTtyVariable = "LOCKSTEP_TTY";
inline constexpr const char* kAttemptVariable =
    "LOCKSTEP_ATTEMPT";  // how often the job has been started again: 0, 1, …
inline constexpr const char* kCheckpointStepVariable =
    "LOCKSTEP_CHECKPOINT_STEP";  // of the newest checkpoint that earlier attempts have reported; 0: none
inline constexpr const char* kRestartCauseVariable = "LOCKSTEP_RESTART_CAUSE";  // why the attempt before has ended
inline constexpr const char* kInPlaceVariable = "LOCKSTEP_IN_PLACE";            // 1: ranks may outlive others
inline constexpr const char* kSpareVariable = "LOCKSTEP_SPARE";                 // 1: a process that has no rank yet
inline constexpr const char* kPreloadVariable = "LOCKSTEP_PRELOAD";  // the user's LD_PRELOAD, meant for mpirun
/// Of a job on several hosts, where they are this host's own.
inline constexpr const char* kShmDirVariable = "LOCKSTEP_SHM";          // where memory files go, for the wrapper
inline constexpr const char* kUserTmpVariable = "LOCKSTEP_TMPDIR";      // the user's TMPDIR, for the wrapper
inline constexpr const char* kHostNameVariable = "LOCKSTEP_HOST_NAME";  // what the user calls this host
/// And the same for all: the rendezvous of the ranks (lockstep/comm/world.h).
inline constexpr const char* kJobIdVariable = "LOCKSTEP_MEETING";  // an id of this job

/// Components of Open MPI with files of shared memory, whose place OMPI_MCA_…_backing_directory says.
inline constexpr const char* kMemoryFilesOf[] = {"btl_vader", "osc_sm", "osc_rdma"};

/// A host of a job on several, as mpirun's host file has it.
struct HostShare {
  std::string name;  // for the launcher's own host, what the system calls it
  int ranks = 0;
};

/// What only a job on several hosts needs.
struct SeveralHosts {
  std::vector<HostShare> shares;      // empty: the job runs on this host alone
  std::string hostfile;               // path of the file that hostfile_text() goes into
  std::string agent;                  // path of this binary without a blank in it, to be started in the place of ssh
  std::string networks;               // for MPI's own connections: "10.0.0.0/24,…"; empty: as it likes
  std::string not_networks;           // or all but these
  std::string job_id;                 // random id of this job
  std::string address;                // of rank 0's host, for the others
  int port = 0;                       // where rank 0 is to listen
  std::vector<std::string> exported;  // names of variables that go along to other hosts
  bool oversubscribed = false;        // more ranks than cores on one of them
};

struct HostFacts {
  int cores = 1;  // that this process may use
  bool is_root = false;
  std::string mpirun;  // full path
  std::string self;    // full path of the running binary
  std::string job_dir;
  std::string shm_dir;
  std::string flight_dir;            // of the ranks' flight records
  std::string socket_path;           // of the launcher
  std::string secret;                // the job's (lockstep/base/job_secret.h)
  int tty_columns = 0;               // for rank 0's progress bar; 0: no terminal
  int tty_prefix = 0;                // of that terminal's, what the launcher's prefix takes
  std::string tty_path;              // by which a rank on this host asks for its size
  int attempt = 0;                   // how often the job has been started again
  std::string restart_cause;         // why the attempt before has ended; empty: there is none
  std::int64_t checkpoint_step = 0;  // of the newest checkpoint that earlier attempts have reported; 0: none
  std::string name;                  // what the user calls this host, if the job names hosts
  SeveralHosts several;
};

struct MpirunCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> set_env;
  std::vector<std::string> unset_env;
  int ranks = 1;
  bool oversubscribed = false;  // more ranks than cores
};

/// The launcher's own variables, for every process of the job, whoever starts them. Those that are all on this host
/// can follow the size of its terminal.
std::vector<std::pair<std::string, std::string>> job_environment(const LaunchOptions& options, const HostFacts& facts,
                                                                 bool on_this_host);

/// `lookup` reads the present environment: settings of Open MPI that the user made there are left alone, except for
/// those on which cleaning up depends.
MpirunCommand mpirun_command(const LaunchOptions& options, const HostFacts& facts, const EnvLookup& lookup);

/// The host file that mpirun gets: one line per rank, in the order of the ranks, for its sequential mapper.
std::string hostfile_text(const SeveralHosts& several);

/// Whether a variable of the launcher's environment goes to other hosts without being asked for: settings of lockstep
/// and of the libraries under it, but not what differs from host to host.
bool goes_along(const std::string& name);

/// mpirun takes an argument ":" of the program for its own separator of programs, so none of them may be one.
std::string protect_argument(const std::string& argument);
std::string unprotect_argument(std::string argument);

/// Cores in this process's affinity mask, bounded by the CPU quota of its control group (`docker run --cpus`).
int usable_cores();

}  // namespace lockstep::launcher
