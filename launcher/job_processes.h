// What has started the ranks of a job: the launcher's own children, and those of its helpers on other hosts.
#pragma once

#include <sys/types.h>

#include <optional>
#include <vector>

#include "launcher/process.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// The rank of a spare (Note [Survivors]), until it has one.
inline constexpr int kSpare = -1;

/// mpirun, which starts a wrapper for each rank, or the wrappers themselves. Not thread-safe; the thread that has
/// started them uses it.
class JobProcesses {
 public:
  static JobProcesses of_mpirun(pid_t pid) {
    JobProcesses processes(true);
    processes.add(0, pid);
    return processes;
  }
  /// Without any yet.
  static JobProcesses of_wrappers() { return JobProcesses(false); }
  void add(int rank, pid_t pid) { all_.push_back({.rank = rank, .pid = pid}); }
  /// A wrapper that the helper on another host starts, and reports the end of: end_remote().
  void add_remote(int rank, std::size_t host) { all_.push_back({.rank = rank, .host = host}); }

  /// Another wrapper for that rank: what becomes of those before it is no failure.
  void replace(int rank, pid_t pid);
  void replace_remote(int rank, std::size_t host);

  /// One for no rank yet, which ends unnoticed; and the place that it takes.
  void add_spare(pid_t pid) { all_.push_back({.rank = kSpare, .pid = pid, .replaced = true}); }
  bool has_spare() const;
  void replace_by_spare(int rank);

  bool are_mpirun() const { return are_mpirun_; }
  /// Takes the exit statuses of those that have ended: at SIGCHLD.
  void collect();
  /// The oldest of that rank that has not: who takes its place comes later.
  void end_remote(std::size_t host, int rank, ExitStatus exit_status);
  /// All on that host have ended with it.
  void lose_host(std::size_t host);
  bool all_ended() const;
  /// Of the first one that failed without kill(); success where none did.
  ExitStatus exit_status() const;

  /// A wrapper that failed without kill(): it was killed, or could not start its program.
  struct Failed {
    int rank;
    std::optional<std::size_t> host;  // if it is not this one
    pid_t pid;                        // 0 on another host
    Clock::time_point at;
  };
  /// None of mpirun.
  std::vector<Failed> failed_wrappers() const;

  /// Stops mpirun, which then cannot end its ranks; wrappers end none.
  void hold() const;
  /// Ends those that still run; those on other hosts are for the caller to end.
  void kill();
  /// Whether kill() was the end of one.
  bool were_killed() const { return killed_; }

 private:
  struct One {
    int rank = 0;
    pid_t pid = 0;
    std::optional<std::size_t> host = {};
    std::optional<ExitStatus> exit_status = {};
    Clock::time_point ended_at = {};
    bool failed = false;    // without kill()
    bool replaced = false;  // so that it does not matter
  };
  explicit JobProcesses(bool are_mpirun) : are_mpirun_(are_mpirun) {}
  void end(std::size_t index, ExitStatus exit_status);
  void forget(int rank);

  std::vector<One> all_;
  bool are_mpirun_;
  bool killed_ = false;
  std::optional<std::size_t> first_failed_;
};

}  // namespace lockstep::launcher
