#include "launcher/process.h"

#include <fcntl.h>
#include <string.h>  // sigabbrev_np
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

/// Runs in the forked child; returns only on failure, with errno set.
void become(const SpawnRequest& request, const int (&standard_fds)[3], pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the request: nobody would kill this process then.
  if (::getppid() != parent) ::_exit(kNotFound);

  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGPIPE, &standard, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);

  for (int target = 0; target < 3; ++target)
    if (::dup2(standard_fds[target], target) < 0) return;
  if (request.inherited_fd >= 0 && ::fcntl(request.inherited_fd, F_SETFD, 0) != 0) return;
  if (!request.directory.empty() && ::chdir(request.directory.c_str()) != 0) return;
  for (const auto& [name, value] : request.set_env) set_env(name, value);
  for (const auto& name : request.unset_env) unset_env(name);
  std::vector<char*> argv;
  for (const auto& argument : request.argv) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
}

}  // namespace

int ExitStatus::exit_code() const {
  switch (how) {
    case How::kExited: return value;
    case How::kSignalled: return 128 + value;
    case How::kNotStarted: return value == ENOENT ? kNotFound : kNotExecutable;
  }
  return value;
}

ExitStatus exit_status_of(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {ExitStatus::How::kSignalled, WTERMSIG(wait_status)};
  return {ExitStatus::How::kExited, WEXITSTATUS(wait_status)};
}

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

Spawned spawn(const SpawnRequest& request) {
  // Here, so that it is not the program that is blamed: containers have such a device that not everybody may write.
  UniqueFd null_in, null_out;
  int standard_fds[] = {request.stdin_fd, request.stdout_fd, request.stderr_fd};
  for (int target = 0; target < 3; ++target) {
    if (standard_fds[target] >= 0) continue;
    UniqueFd& null = target == 0 ? null_in : null_out;
    if (!null) null = UniqueFd(::open("/dev/null", (target == 0 ? O_RDONLY : O_WRONLY) | O_CLOEXEC));
    if (!null)
      throw DeviceError(fmt::format("cannot {} /dev/null: {}", target == 0 ? "read" : "write", errno_text(errno)),
                        "give it the permissions that it has everywhere: chmod 666 /dev/null, as root");
    standard_fds[target] = null.get();
  }
  int ends[2];
  check_system(::pipe2(ends, O_CLOEXEC) == 0, "making a pipe");
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  check_system(pid >= 0, "starting a process");
  if (pid == 0) {
    // The pipe moves out of the way of the three standard descriptors, which the program gets.
    const int report = ::fcntl(write_end.get(), F_DUPFD_CLOEXEC, 3);
    become(request, standard_fds, parent);
    const int error = errno;
    [[maybe_unused]] const auto written = ::write(report, &error, sizeof error);
    ::_exit(kNotFound);
  }
  write_end.reset();
  int error = 0;
  ssize_t got;
  do got = ::read(read_end.get(), &error, sizeof error);
  while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(sizeof error)) return {pid, 0};
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  return {-1, error};
}

std::optional<std::string> find_program(const std::string& name, const EnvLookup& lookup) {
  for (const auto& directory : split(lookup("PATH").value_or("/usr/local/bin:/usr/bin:/bin"), ':')) {
    const std::string path = (directory.empty() ? "." : directory) + "/" + name;
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return std::nullopt;
}

SignalQueue::SignalQueue(const std::vector<int>& numbers) {
  struct sigaction ignore = {}, standard = {};
  ignore.sa_handler = SIG_IGN;
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGPIPE, &ignore, &old_pipe_);
  ::sigaction(SIGCHLD, &standard, &old_child_);  // an ignored SIGCHLD would swallow the exit status
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int number : numbers) {
    struct sigaction current = {};
    ::sigaction(number, nullptr, &current);
    // A blocked signal is queued even when it is ignored, so it must not be asked for.
    if (current.sa_handler != SIG_IGN) sigaddset(&wanted, number);
  }
  ::sigprocmask(SIG_BLOCK, &wanted, &old_mask_);
  fd_.reset(::signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC));
  check_system(bool(fd_), "making a signal descriptor");
}

SignalQueue::~SignalQueue() {
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::sigaction(SIGCHLD, &old_child_, nullptr);
}

std::optional<SignalQueue::Received> SignalQueue::next() {
  signalfd_siginfo info;
  if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return Received{static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)};
}

void open_standard_fds() {
  int fd;
  do fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) ::close(fd);
}

void check_system(bool ok, const std::string& doing) {
  if (ok) return;
  const int error = errno;
  throw DeviceError(fmt::format("{}: {}", doing, errno_text(error)),
                    error == EMFILE   ? "raise ulimit -n, the number of open files"
                    : error == EAGAIN ? "raise ulimit -u and the control group's pids.max, the number of processes"
                                      : "");
}

}  // namespace lockstep::launcher
