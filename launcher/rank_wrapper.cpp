#include "launcher/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/flight_snapshot.h"
#include "base/resource_limits.h"
#include "base/status_report.h"
#include "base/text.h"
#include "launcher/channel.h"
#include "launcher/job_processes.h"
#include "launcher/mpirun_command.h"
#include "launcher/process.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

/// Beyond this much unsent output the program has to wait.
constexpr std::size_t kBacklogBytes = 1 << 20;

struct Pipe {
  UniqueFd read_end, write_end;
};

/// Keeps the ends of messages, and takes each whole or not at all.
Pipe make_status_socket() {
  int ends[2];
  check_system(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "making a socket");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::string inode_of(int fd) {
  struct stat found = {};
  check_system(::fstat(fd, &found) == 0, "looking at a descriptor");
  return std::to_string(found.st_ino);
}

Pipe make_pipe() {
  int ends[2];
  check_system(::pipe2(ends, O_CLOEXEC) == 0, "making a pipe");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

class Wrapper {
 public:
  Wrapper(Channel& launcher, SignalQueue& signals) : launcher_(launcher), signals_(signals) {}

  int run(int rank, const std::vector<std::string>& program) {
    rank_ = rank;
    start(rank, program);
    while (!exit_status_) wait_and_serve();
    finish_output();
    if (!exit_status_->ok()) {
      read_flight();
      if (!flight_.bytes.empty()) launcher_.send(flight_);
    }
    launcher_.send(
        Ended{*exit_status_, stop_requested_ && !was_killed_by_another(), ended_at_, memory_kills_meanwhile()});
    // A wrapper whose program failed stays until the launcher lets it go: see Note [How a job ends].
    while (connected_ && (launcher_.pending_bytes() > 0 || !exit_status_->ok())) wait_and_serve();
    return exit_status_->exit_code();
  }

 private:
  void start(int rank, const std::vector<std::string>& program) {
    Pipe status = make_status_socket();  // first: shells write to descriptors of one digit alone
    Pipe pipes[2] = {make_pipe(), make_pipe()};
    SpawnRequest request;
    for (const auto& argument : program) request.argv.push_back(unprotect_argument(argument));
    request.stdout_fd = pipes[0].write_end.get();
    request.stderr_fd = pipes[1].write_end.get();
    request.inherited_fd = status.write_end.get();
    request.set_env.emplace_back(
        kStatusVariable,
        fmt::format("{}:{}:{}", request.inherited_fd, inode_of(request.inherited_fd), inode_of(request.stderr_fd)));
    request.set_env.emplace_back(kStatusFdVariable, std::to_string(request.inherited_fd));
    if (rank != 0) request.unset_env.emplace_back(kTtyVariable);
    // mpirun has passed on the launcher's host's directories.
    if (const auto directory = env(kShmDirVariable))
      for (const char* component : kMemoryFilesOf)
        request.set_env.emplace_back(fmt::format("OMPI_MCA_{}_backing_directory", component), *directory);
    if (const auto directory = env(kUserTmpVariable)) {
      request.set_env.emplace_back("TMPDIR", *directory);
      if (directory->empty()) request.unset_env.emplace_back("TMPDIR");
      request.unset_env.emplace_back(kUserTmpVariable);
    }
    // Still there where mpirun could not load the library.
    if (const auto users = env(kPreloadVariable)) {
      request.set_env.emplace_back("LD_PRELOAD", *users);
      if (users->empty()) request.unset_env.emplace_back("LD_PRELOAD");
      request.unset_env.emplace_back(kPreloadVariable);
    }
    memory_kills_before_ = memory_kills();
    const Spawned spawned = spawn(request);
    program_ = spawned.pid;
    launcher_.send(Hello{rank, std::max(spawned.pid, 0), host_name()});
    for (int i = 0; i < 2; ++i) outputs_[i] = std::move(pipes[i].read_end);
    status_ = std::move(status.read_end);
    if (spawned.pid < 0) end_with({ExitStatus::How::kNotStarted, spawned.error});
  }

  void wait_and_serve() {
    const bool read_on = launcher_.pending_bytes() < kBacklogBytes;
    const short socket_events = static_cast<short>(POLLIN | (launcher_.pending_bytes() > 0 ? POLLOUT : 0));
    pollfd entries[] = {{signals_.fd(), POLLIN, 0},
                        {launcher_.fd(), socket_events, 0},
                        {read_on ? outputs_[0].get() : -1, POLLIN, 0},
                        {read_on ? outputs_[1].get() : -1, POLLIN, 0},
                        {read_on ? status_.get() : -1, POLLIN, 0}};
    if (::poll(entries, std::size(entries), -1) < 0) {
      check_system(errno == EINTR, "waiting for the program");
      return;
    }
    if (entries[4].revents != 0) pass_status();
    for (int i = 0; i < 2; ++i)
      if (entries[2 + i].revents != 0) pass_output(i);
    if (entries[1].revents != 0) listen_to_launcher();
    if (entries[0].revents != 0) take_signals();
  }

  /// Passes one piece on; false when there is nothing to read now. At end-of-file the pipe is closed.
  bool pass_output(int index) {
    char chunk[64 * 1024];
    const ssize_t got = ::read(outputs_[index].get(), chunk, sizeof chunk);
    if (got < 0) return errno == EINTR;
    if (got == 0) {
      outputs_[index].reset();
      return false;
    }
    pass_status();  // what was said before these bytes were written
    launcher_.send(Output{static_cast<std::uint8_t>(index + 1), {chunk, static_cast<std::size_t>(got)}});
    return true;
  }

  /// Passes on what the program says of itself; what makes no sense is some other program's, and dropped.
  void pass_status() {
    char message[StatusReport::kMaxTextBytes + 4 * StatusReport::kMaxRanks + 64];
    while (status_) {
      const ssize_t got = ::recv(status_.get(), message, sizeof message, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return status_.reset();
      const std::string_view bytes(message, static_cast<std::size_t>(got));
      if (auto report = decode_status(bytes)) {
        launcher_.send(Status{std::move(*report)});
        continue;
      }
      for (const auto& line : split(std::string(bytes), '\n'))
        if (auto report = parse_status_line(line)) launcher_.send(Status{std::move(*report)});
    }
  }

  /// After the program's end: reads the present content of the pipes, not later output of a detached process.
  void finish_output() {
    pass_status();
    for (int i = 0; i < 2; ++i) {
      constexpr int kPipePieces = 1 << 20 >> 16;  // the largest pipe an ordinary user can have, in pieces of 64 KiB
      for (int piece = 0; outputs_[i] && piece < kPipePieces && pass_output(i);) ++piece;
      outputs_[i].reset();
    }
  }

  /// Reads the program's flight record. If the program was asked to stop, the first reading counts: its place at the
  /// request, not its progress since then.
  void read_flight() {
    const auto directory = env(flight::kDirectoryVariable);
    if (!flight_.bytes.empty() || !directory || directory->empty()) return;
    try {
      flight_.bytes = flight::read_bytes(flight::path_of(*directory, rank_));
      flight_.at_ns = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
    } catch (const IoError&) {
      return;  // a program that keeps none, or none yet
    }
  }

  void listen_to_launcher() {
    launcher_.flush();
    const auto received = launcher_.receive();
    while (const auto message = launcher_.next()) {
      if (const auto* signal = std::get_if<Signal>(&*message)) pass_signal(signal->signal_number);
      if (const auto* rejoin = std::get_if<Rejoin>(&*message)) give_place(rejoin->place);
    }
    if (received != Channel::Received::kGone) return;
    // The launcher has died, or let this wrapper go.
    connected_ = false;
    if (!exit_status_) {
      kill_program(SIGKILL);
      end_with({ExitStatus::How::kSignalled, SIGKILL});
    }
  }

  void give_place(const std::string& bytes) {
    const auto place = decode_place(bytes);
    if (!place || !status_) return;
    for (const auto& [name, value] : *place)
      if (name == "RANK") rank_ = static_cast<int>(parse_int(value).value_or(rank_));
    ::send(status_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void take_signals() {
    while (const auto signal = signals_.next()) {
      if (signal->number == SIGCHLD) {
        reap();
      } else if (signal->number == SIGCONT) {
        // mpirun has begun to end the job: it sends this first, and SIGTERM a second later.
        if (signal->sender == ::getppid()) launcher_.send(StopNotice{SIGCONT});
      } else {
        const bool was_requested = stop_requested_;
        pass_signal(signal->number);
        if (stop_requested_ && !was_requested) launcher_.send(StopNotice{signal->number});
      }
    }
  }

  void reap() {
    int status = 0;
    while (!exit_status_ && ::waitpid(program_, &status, WNOHANG | WUNTRACED | WCONTINUED) == program_) look_at(status);
  }

  void look_at(int status) {
    if (WIFSTOPPED(status)) {
      launcher_.send(Status{{.kind = StatusReport::Kind::kStopped, .number = WSTOPSIG(status)}});
    } else if (WIFCONTINUED(status)) {
      launcher_.send(Status{{.kind = StatusReport::Kind::kContinued}});
    } else {
      end_with(exit_status_of(status));
    }
  }

  /// A stop may come from the launcher, from mpirun and from a scheduler that signals all processes of a job, whenever
  /// each of them gets to it; to the program a second one would mean that it is to end at once. That is the launcher's
  /// to say, with SIGKILL.
  void pass_signal(int number) {
    reap();  // a program that has ended already was not stopped by this signal
    if (exit_status_) return;
    const bool is_stop = number != SIGUSR1 && number != SIGUSR2;
    if (is_stop) read_flight();
    if (is_stop && number != SIGKILL && std::exchange(stop_requested_, true)) return;
    stop_requested_ = stop_requested_ || is_stop;
    kill_program(number);
    if (is_stop) kill_program(SIGCONT);  // one that is stopped would not see it
  }

  /// A rank's sockets close before it has wholly ended. On a busy machine others may fail at that, and this one be
  /// asked to stop because of them, in between.
  bool was_killed_by_another() const {
    return !has_killed_ && exit_status_ == ExitStatus{ExitStatus::How::kSignalled, SIGKILL};
  }

  /// The program's whole process group, or the program alone if it has left that.
  void kill_program(int number) {
    has_killed_ = has_killed_ || number == SIGKILL;
    if (::kill(-program_, number) != 0) ::kill(program_, number);
  }

  std::int64_t memory_kills_meanwhile() const {
    const auto now = memory_kills();
    return now && memory_kills_before_ ? static_cast<std::int64_t>(*now - *memory_kills_before_) : -1;
  }

  void end_with(ExitStatus exit_status) {
    ended_at_ = Clock::now();
    exit_status_ = exit_status;
    if (program_ > 0) ::kill(-program_, SIGKILL);  // what remains of it
  }

  Channel& launcher_;
  SignalQueue& signals_;
  UniqueFd outputs_[2];
  UniqueFd status_;
  int rank_ = -1;
  Flight flight_;
  pid_t program_ = -1;
  std::optional<ExitStatus> exit_status_;
  std::optional<std::uint64_t> memory_kills_before_;
  Clock::time_point ended_at_;
  bool stop_requested_ = false;
  bool has_killed_ = false;
  bool connected_ = true;
};

}  // namespace

int rank_wrapper(const std::vector<std::string>& program) {
  // If the launcher or mpirun died before this, connecting fails or the launcher closes the connection: no parent needs
  // checking.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  open_standard_fds();
  const auto rank = env(kSpareVariable) ? std::optional<std::int64_t>(kSpare)
                                        : parse_int(env("OMPI_COMM_WORLD_RANK").value_or(env("RANK").value_or("")));
  const auto address = env(kLauncherVariable);
  check_usage(rank && address, "_rank is started by `lockstep launch`, not by hand",
              "run `lockstep launch -- PROGRAM`");
  check_usage(!program.empty(), "_rank: no program", "run `lockstep launch -- PROGRAM`");
  // Before the child exists, so that its end is not missed.
  SignalQueue signals({SIGCHLD, SIGCONT, SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2});
  Channel launcher(connect_to(*address, JobSecret::from(env)));
  return Wrapper(launcher, signals).run(static_cast<int>(*rank), program);
}

}  // namespace lockstep::launcher
