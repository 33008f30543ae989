#include "launcher/job_processes.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>

namespace lockstep::launcher {

void JobProcesses::collect() {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    One& one = all_[i];
    int status = 0;
    if (one.exit_status || ::waitpid(one.pid, &status, WNOHANG) != one.pid) continue;
    one.exit_status = exit_status_of(status);
    one.ended_at = Clock::now();
    one.failed = !killed_ && !one.exit_status->ok();
    if (one.failed && !first_failed_) first_failed_ = i;
  }
}

bool JobProcesses::all_ended() const {
  return std::ranges::all_of(all_, [](const One& one) { return one.exit_status.has_value(); });
}

ExitStatus JobProcesses::exit_status() const {
  if (first_failed_) return *all_[*first_failed_].exit_status;
  // What kill() has ended, where that is all there is.
  return are_mpirun_ && all_.front().exit_status ? *all_.front().exit_status : ExitStatus{};
}

std::vector<JobProcesses::Failed> JobProcesses::failed_wrappers() const {
  std::vector<Failed> failed;
  if (are_mpirun_) return failed;
  for (std::size_t rank = 0; rank < all_.size(); ++rank)
    if (all_[rank].failed) failed.push_back({static_cast<int>(rank), all_[rank].pid, all_[rank].ended_at});
  return failed;
}

void JobProcesses::hold() const {
  if (are_mpirun_ && !all_ended()) ::kill(all_.front().pid, SIGSTOP);
}

void JobProcesses::kill() {
  collect();
  for (const One& one : all_) {
    if (one.exit_status) continue;
    ::kill(one.pid, SIGKILL);
    killed_ = true;
  }
}

}  // namespace lockstep::launcher
