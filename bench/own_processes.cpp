#include "bench/own_processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/signals.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::bench {
namespace {

constexpr auto kLook = std::chrono::milliseconds(20);
// Ranks that lose one of them find out themselves, and say so in order.
constexpr auto kGrace = std::chrono::seconds(3);

/// One that is free now.
int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (!socket || ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw DeviceError("no port of 127.0.0.1 is free: " + errno_text(errno), "end what holds them");
  return ntohs(address.sin_port);
}

/// Ends what is left of them.
class Processes {
 public:
  Processes() = default;
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
    for (const pid_t pid : pids_)
      while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
  }
  void add(pid_t pid) { pids_.push_back(pid); }
  bool empty() const { return pids_.empty(); }
  /// Notes who has ended.
  void look() {
    std::erase_if(pids_, [this](pid_t pid) {
      int status = 0;
      if (::waitpid(pid, &status, WNOHANG) != pid) return false;
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (code != 0 && first_failure_ == 0) first_failure_ = code;
      return true;
    });
  }
  int first_failure() const { return first_failure_; }

 private:
  std::vector<pid_t> pids_;
  int first_failure_ = 0;
};

[[noreturn]] void be_child(int rank, int count, int port, pid_t parent, int result,
                           const std::function<std::string(int)>& work) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  int code = 0;
  try {
    if (count > 1) {
      for (const char* name : {"RANK", "LOCAL_RANK"}) set_env(name, std::to_string(rank));
      for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) set_env(name, std::to_string(count));
      set_env("MASTER_ADDR", "127.0.0.1");
      set_env("MASTER_PORT", std::to_string(port));
    }
    const std::string text = work(rank);
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t written = ::write(result, text.data() + at, text.size() - at);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) throw DeviceError("a result is lost: " + errno_text(errno));
      at += static_cast<std::size_t>(written);
    }
  } catch (const PeerError& error) {
    code = error.code();
  } catch (const InterruptedError& error) {
    code = error.code();
  } catch (const Error& error) {
    log_error("{}", error.line());
    code = error.code();
  } catch (const std::exception& error) {
    log_error("unexpected error: {}", error.what());
    code = static_cast<int>(ExitCode::kInternal);
  }
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

std::string run_processes(int count, const std::function<std::string(int rank)>& work) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) throw DeviceError("no pipe: " + errno_text(errno));
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  const int port = count > 1 ? free_port() : 0;
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  Processes processes;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw DeviceError("no new process: " + errno_text(errno), "end some others");
    if (pid == 0) be_child(rank, count, port, parent, write_end.get(), work);
    processes.add(pid);
  }
  write_end.reset();

  std::string text;
  std::optional<Deadline> end;
  while (!processes.empty() || read_end) {
    throw_if_stopped("measuring");
    processes.look();
    if (processes.first_failure() != 0 && !end) end = Deadline::after(kGrace);
    if (end && end->expired()) break;
    pollfd wanted = {.fd = read_end.get(), .events = POLLIN, .revents = 0};  // a negative one is skipped
    if (::poll(&wanted, 1, static_cast<int>(kLook.count())) <= 0) continue;
    char buffer[4096];
    const ssize_t got = ::read(read_end.get(), buffer, sizeof buffer);
    if (got > 0) text.append(buffer, static_cast<std::size_t>(got));
    if (got == 0) read_end.reset();
  }
  if (processes.first_failure() != 0)
    throw PeerError(processes.first_failure(), "a process of the measurement has failed and reported why");
  return text;
}

namespace {

constexpr std::size_t kMostStderr = 1 << 16;
constexpr auto kMostGrace = std::chrono::seconds(90);  // the launcher ends its ranks sooner

[[noreturn]] void become(char* const* argv, int out, int err, pid_t parent) {
  // A group of its own: the terminal's Ctrl-C comes to this process alone, which passes it on once.
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  const int nothing = ::open("/dev/null", O_RDONLY);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::execv(argv[0], argv);
  ::_exit(127);
}

/// Adds what there is to read; closes the end of a pipe that has nothing more.
void drain(UniqueFd& end, std::string& text) {
  char buffer[4096];
  const ssize_t got = ::read(end.get(), buffer, sizeof buffer);
  if (got > 0) text.append(buffer, static_cast<std::size_t>(got));
  if (got == 0) end.reset();
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  int out[2] = {-1, -1}, err[2] = {-1, -1};
  const bool piped = ::pipe2(out, O_CLOEXEC) == 0;
  UniqueFd out_read(out[0]), out_write(out[1]);
  if (!piped || ::pipe2(err, O_CLOEXEC) != 0) throw DeviceError("no pipe: " + errno_text(errno));
  UniqueFd err_read(err[0]), err_write(err[1]);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) throw DeviceError("no new process: " + errno_text(errno), "end some others");
  if (pid == 0) become(argv.data(), out_write.get(), err_write.get(), parent);
  out_write.reset();
  err_write.reset();

  ProgramResult result;
  std::optional<Deadline> end;
  while (out_read || err_read) {
    if (!end && stop_signal() != 0) {
      ::kill(pid, SIGTERM);
      end = Deadline::after(kMostGrace);
    }
    if (end && end->expired()) {
      ::kill(pid, SIGKILL);
      break;
    }
    // Seldom: what is measured meanwhile has the cores.
    pollfd wanted[2] = {{.fd = out_read.get(), .events = POLLIN, .revents = 0},
                        {.fd = err_read.get(), .events = POLLIN, .revents = 0}};
    if (::poll(wanted, 2, 100) <= 0) continue;
    if (wanted[0].revents != 0) drain(out_read, result.out);
    if (wanted[1].revents != 0) drain(err_read, result.err);
    if (result.err.size() > 2 * kMostStderr) result.err.erase(0, result.err.size() - kMostStderr);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  throw_if_stopped("measuring");
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (result.code == 127 && result.out.empty() && result.err.empty())
    throw DeviceError(command[0] + " cannot be started", "is the program still there?");
  return result;
}

}  // namespace lockstep::bench
