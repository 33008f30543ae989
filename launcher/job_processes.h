// The launcher's own children: what has started the ranks of a job.
#pragma once

#include <sys/types.h>

#include <optional>
#include <vector>

#include "launcher/process.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// mpirun, which starts a wrapper for each rank, or the wrappers themselves. Not thread-safe; the thread that has
/// started them uses it.
class JobProcesses {
 public:
  static JobProcesses of_mpirun(pid_t pid) { return {{pid}, true}; }
  /// Without any yet; add() takes them in the order of the ranks.
  static JobProcesses of_wrappers() { return {{}, false}; }
  void add(pid_t pid) { all_.push_back({.pid = pid, .exit_status = {}, .ended_at = {}}); }

  bool are_mpirun() const { return are_mpirun_; }
  /// Takes the exit statuses of those that have ended: at SIGCHLD.
  void collect();
  bool all_ended() const;
  /// Of the first one that failed without kill(); success where none did.
  ExitStatus exit_status() const;

  /// A wrapper that failed without kill(): it was killed, or could not start its program.
  struct Failed {
    int rank;
    pid_t pid;
    Clock::time_point at;
  };
  /// None of mpirun.
  std::vector<Failed> failed_wrappers() const;

  /// Stops mpirun, which then cannot end its ranks; wrappers end none.
  void hold() const;
  /// Ends those that still run.
  void kill();
  /// Whether kill() was the end of one.
  bool were_killed() const { return killed_; }

 private:
  struct One {
    pid_t pid;
    std::optional<ExitStatus> exit_status;
    Clock::time_point ended_at;
    bool failed = false;  // without kill()
  };
  JobProcesses(const std::vector<pid_t>& pids, bool are_mpirun) : are_mpirun_(are_mpirun) {
    for (const pid_t pid : pids) add(pid);
  }

  std::vector<One> all_;
  bool are_mpirun_;
  bool killed_ = false;
  std::optional<std::size_t> first_failed_;
};

}  // namespace lockstep::launcher
