// Child processes that end with their parent, and signals read from a file descriptor.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/scope.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

// Exit codes of a program that cannot be started, as shells have them.
inline constexpr int kNotExecutable = 126;
inline constexpr int kNotFound = 127;

/// How a process ended.
struct ExitStatus {
  enum class How : unsigned char { kExited, kSignalled, kNotStarted };
  How how = How::kExited;
  int value = 0;  // exit code, signal number, or the errno of the failed exec

  void fields(auto& io) { io(how, value); }
  bool ok() const { return how == How::kExited && value == 0; }
  /// What a shell would return: the code, 128 + signal, kNotFound or kNotExecutable.
  int exit_code() const;
  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};

/// From waitpid's status.
ExitStatus exit_status_of(int wait_status);

/// "SIGKILL"; "signal 77" for numbers without a name.
std::string signal_name(int number);

struct SpawnRequest {
  std::vector<std::string> argv;  // argv[0] is looked up in PATH
  std::vector<std::pair<std::string, std::string>> set_env;
  std::vector<std::string> unset_env;
  int stdin_fd = -1, stdout_fd = -1, stderr_fd = -1;  // -1: /dev/null
  std::string directory;                              // to start in; empty: this process's
  int inherited_fd = -1;                              // one more that the program gets, under its number; -1: none
};

struct Spawned {
  pid_t pid = -1;  // -1 if the program could not be started
  int error = 0;   // then this is why (errno of exec)
};

/// Starts a program in a process group of its own, with default signal handling, that the kernel kills (SIGKILL) when
/// the calling *thread* ends. Returns when exec has succeeded or failed. Call it from the main thread of a process
/// without other threads. Throws DeviceError when the system has no pipe or process left, or no /dev/null that may be
/// used.
Spawned spawn(const SpawnRequest& request);

/// The full path of `name` along PATH; nothing if there is no such executable.
std::optional<std::string> find_program(const std::string& name, const EnvLookup& lookup = env);

/// Blocks the given signals for this process and hands them out through a file descriptor; what was blocked and
/// ignored before comes back at the end. Signals that this process was started to ignore (nohup) stay ignored.
/// While one exists SIGPIPE is ignored. Not thread-safe; one at a time.
class SignalQueue {
 public:
  explicit SignalQueue(const std::vector<int>& numbers);
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  struct Received {
    int number;
    pid_t sender;
  };
  int fd() const { return fd_.get(); }  // readable when a signal waits
  std::optional<Received> next();

 private:
  UniqueFd fd_;
  sigset_t old_mask_;
  struct sigaction old_child_ = {}, old_pipe_ = {};
};

/// Opens /dev/null for those of stdin, stdout and stderr that this process was started without, so that no pipe or
/// socket takes their place.
void open_standard_fds();

/// Throws DeviceError("doing: errno text") unless `ok`.
void check_system(bool ok, const std::string& doing);

}  // namespace lockstep::launcher
