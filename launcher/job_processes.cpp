#include "launcher/job_processes.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>

namespace lockstep::launcher {

void JobProcesses::replace(int rank, pid_t pid) {
  forget(rank);
  add(rank, pid);
}

void JobProcesses::replace_remote(int rank, std::size_t host) {
  forget(rank);
  add_remote(rank, host);
}

bool JobProcesses::has_spare() const {
  return std::ranges::any_of(all_, [](const One& one) { return one.rank == kSpare && !one.exit_status; });
}

void JobProcesses::replace_by_spare(int rank) {
  forget(rank);
  for (One& one : all_) {
    if (one.rank != kSpare || one.exit_status) continue;
    one.rank = rank;
    one.replaced = false;
  }
}

void JobProcesses::forget(int rank) {
  for (One& one : all_) {
    if (one.rank != rank) continue;
    one.replaced = true;
    one.failed = false;
  }
  if (first_failed_ && all_[*first_failed_].replaced) first_failed_.reset();
}

void JobProcesses::collect() {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const One& one = all_[i];
    int status = 0;
    if (!one.exit_status && !one.host && ::waitpid(one.pid, &status, WNOHANG) == one.pid)
      end(i, exit_status_of(status));
  }
}

void JobProcesses::end(std::size_t index, ExitStatus exit_status) {
  One& one = all_[index];
  one.exit_status = exit_status;
  one.ended_at = Clock::now();
  one.failed = !killed_ && !exit_status.ok() && !one.replaced;
  if (one.failed && !first_failed_) first_failed_ = index;
}

void JobProcesses::end_remote(std::size_t host, int rank, ExitStatus exit_status) {
  for (std::size_t i = 0; i < all_.size(); ++i)
    if (all_[i].host == host && all_[i].rank == rank && !all_[i].exit_status) return end(i, exit_status);
}

void JobProcesses::lose_host(std::size_t host) {
  for (One& one : all_)
    if (one.host == host && !one.exit_status) one.exit_status = ExitStatus{ExitStatus::How::kSignalled, SIGKILL};
}

bool JobProcesses::all_ended() const {
  return std::ranges::all_of(all_, [](const One& one) { return one.exit_status.has_value(); });
}

ExitStatus JobProcesses::exit_status() const {
  if (first_failed_) return *all_[*first_failed_].exit_status;
  // Without a failure only kill() has ended it.
  return are_mpirun_ && all_.front().exit_status ? *all_.front().exit_status : ExitStatus{};
}

std::vector<JobProcesses::Failed> JobProcesses::failed_wrappers() const {
  std::vector<Failed> failed;
  if (are_mpirun_) return failed;
  for (const One& one : all_)
    if (one.failed) failed.push_back({one.rank, one.host, one.pid, one.ended_at});
  return failed;
}

void JobProcesses::hold() const {
  if (are_mpirun_ && !all_ended()) ::kill(all_.front().pid, SIGSTOP);
}

void JobProcesses::kill() {
  collect();
  for (const One& one : all_) {
    if (one.exit_status) continue;
    if (!one.host) ::kill(one.pid, SIGKILL);
    killed_ = true;
  }
}

}  // namespace lockstep::launcher
