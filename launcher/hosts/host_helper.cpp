#include "launcher/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
#include "launcher/channel.h"
#include "launcher/hosts/byte_pipe.h"
#include "launcher/hosts/greeting.h"
#include "launcher/hosts/local_addresses.h"
#include "launcher/hosts/protocol.h"
#include "launcher/hosts/shared_directory.h"
#include "launcher/job_dir.h"
#include "launcher/mpirun_command.h"
#include "launcher/process.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::launcher {
namespace {

/// Beyond this much that the launcher has not taken yet the ranks have to wait.
constexpr std::size_t kBacklogBytes = 1 << 20;
/// From a greeting to the launcher's JobSetup: it waits for the other hosts' greetings.
constexpr auto kJobSetupTimeout = std::chrono::seconds(30);
/// What a wrapper that has ended may have left in its socket, amply.
constexpr std::size_t kSocketBytes = 4 << 20;

/// An end of its own for each direction, since BytePipe closes them one by one.
BytePipe pipe_of(UniqueFd socket) {
  UniqueFd out(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 3));
  return {std::move(socket), std::move(out)};
}

/// Standard input and output, which then mean /dev/null to all else.
BytePipe take_standard_streams() {
  UniqueFd in(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)), out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  check_system(in && out && null && ::dup2(null.get(), 0) == 0 && ::dup2(null.get(), 1) == 1,
               "taking over standard input and output");
  return {std::move(in), std::move(out)};
}

std::string user_shell() {
  const std::string shell = env("SHELL").value_or("");
  return shell.starts_with('/') && ::access(shell.c_str(), X_OK) == 0 ? shell : "/bin/sh";
}

class Helper {
 public:
  Helper(BytePipe launcher, SignalQueue& signals) : launcher_(std::move(launcher)), signals_(signals) {}

  int run() {
    RunningClock::start();
    while (launcher_.in() >= 0 && !ended_ && !silent_at_.expired()) wait_and_serve();
    const bool silent = launcher_.in() >= 0 && !ended_;
    if (ended_) flush();
    end_job();
    if (!silent) return static_cast<int>(ExitCode::kOk);
    // Should the connection come back, this says why there is nothing left to talk to.
    std::fprintf(stderr, "no word from the launcher for %.0f s, so its part of the job has ended here\n",
                 std::chrono::duration<double>(silence_).count());
    return static_cast<int>(ExitCode::kTimeout);
  }

 private:
  void wait_and_serve() {
    const bool read_on = launcher_.pending_bytes() < kBacklogBytes;
    std::vector<pollfd> entries = {{launcher_.in(), POLLIN, 0},
                                   {launcher_.pending_bytes() > 0 ? launcher_.out() : -1, POLLOUT, 0},
                                   {signals_.fd(), POLLIN, 0},
                                   {listener_ ? listener_->fd() : -1, POLLIN, 0},
                                   {read_on ? starter_output_.in() : -1, POLLIN, 0}};
    const std::size_t first_rank = entries.size();
    for (const auto& [id, rank] : ranks_) {
      entries.push_back({read_on ? rank.in() : -1, POLLIN, 0});
      entries.push_back({rank.pending_bytes() > 0 ? rank.out() : -1, POLLOUT, 0});
    }
    const auto left = std::chrono::ceil<Millis>(silent_at_.remaining());
    const auto timeout_ms = std::clamp<std::int64_t>(left.count(), 0, 3'600'000);
    if (::poll(entries.data(), entries.size(), static_cast<int>(timeout_ms)) < 0) {
      check_system(errno == EINTR, "waiting for the launcher");
      return;
    }
    if (entries[1].revents != 0) launcher_.flush();
    std::size_t index = first_rank;
    for (auto& [id, rank] : ranks_) {
      if (entries[index++].revents != 0) pass_on(id, rank);
      if (entries[index++].revents != 0) rank.flush();
    }
    std::erase_if(ranks_, [](const auto& entry) { return entry.second.in() < 0; });
    if (entries[4].revents != 0) pass_starter_output();
    if (entries[3].revents != 0) accept_ranks();
    if (entries[2].revents != 0) take_signals();
    if (entries[0].revents != 0) listen_to_launcher();
  }

  void send(const HostMessage& message) { launcher_.send(encode_host(message)); }

  void listen_to_launcher() {
    const auto bytes = launcher_.receive();
    if (bytes.empty()) return;
    silent_at_ = Deadline::after(silence_);
    decoder_.feed(bytes);
    while (const auto message = decoder_.next()) std::visit([this](const auto& each) { obey(each); }, *message);
  }

  void obey(const JobSetup& setup) {
    if (job_) throw MpiError("a host is given a second job setup before the first job's end");
    silence_ = duration_of(setup.silence_seconds);
    silent_at_ = Deadline::after(silence_);
    name_ = setup.name;
    Ready ready;
    if (::chdir(setup.directory.c_str()) != 0)
      ready.warning =
          fmt::format("the directory {} is not there, so its ranks start in the home directory", setup.directory);
    // Found in PATH or not is for the ranks to see: theirs may be another.
    if (setup.program.find('/') != std::string::npos && ready.warning.empty() &&
        ::access(setup.program.c_str(), F_OK) != 0)
      return send(
          Refused{fmt::format("there is no {} there → every host needs the program at the same path", setup.program)});
    directory_ = ready.warning.empty() ? setup.directory : std::string();
    if (::chdir(env("HOME").value_or("/").c_str()) != 0) [[maybe_unused]]
      const int root = ::chdir("/");
    try {
      job_.emplace(job_tmp_base(), job_shm_base(setup.ranks));
      ready.directory = job_->path();
      ready.shm_directory = job_->shm_path();
      for (const auto& directory : {ready.directory, ready.shm_directory}) write_token(directory, setup.token);
      secret_ = JobSecret::of_text(setup.secret);
      listener_.emplace(listen_for_job(job_->path() + "/launcher", secret_, setup.ranks));
      if (setup.finds_port) ready.port = find_free_port();
    } catch (const Error& error) {
      return send(Refused{error.line()});
    }
    send(ready);
  }

  void obey(const ToRank& to) {
    if (const auto found = ranks_.find(to.id); found != ranks_.end()) found->second.send(to.bytes);
  }

  void obey(const CloseConnection& close) { ranks_.erase(close.id); }

  void obey(const Run& run) {
    if (!job_ || daemon_ > 0) throw MpiError("a second daemon of Open MPI is asked for");
    const UniqueFd output = open_starter_output();
    SpawnRequest request;
    request.argv = {user_shell(), "-c", run.command};
    request.stdout_fd = request.stderr_fd = output.get();
    add_job_variables(request);
    request.set_env.emplace_back(kShmDirVariable, job_->shm_path());
    request.set_env.emplace_back("OMPI_MCA_orte_tmpdir_base", job_->path());
    if (!env("HWLOC_COMPONENTS")) request.set_env.emplace_back("HWLOC_COMPONENTS", "-gl");
    request.unset_env = {"OMPI_MCA_orte_remote_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base"};
    const Spawned spawned = spawn(request);
    daemon_ = spawned.pid;
    if (spawned.pid < 0) send(RunEnded{{ExitStatus::How::kNotStarted, spawned.error}});
  }

  void obey(const StartRank& start) {
    if (!job_ || start.argv.empty()) throw MpiError("a rank is to be started before its job");
    if (!wrapper_output_) wrapper_output_ = open_starter_output();
    SpawnRequest request;
    request.argv = start.argv;
    request.directory = directory_;
    request.stdout_fd = request.stderr_fd = wrapper_output_.get();
    request.set_env = start.set_env;
    request.unset_env = start.unset_env;
    add_job_variables(request);
    const Spawned spawned = spawn(request);
    if (spawned.pid > 0) {
      wrappers_[spawned.pid] = start.rank;
    } else {
      send(RankEnded{start.rank, {ExitStatus::How::kNotStarted, spawned.error}});
    }
  }

  void obey(const FileRequest& request) { send(FileReply{handle_file_request(request, directory_)}); }

  void obey(const EndRanks&) {
    for (const auto& [pid, rank] : wrappers_) ::kill(pid, SIGKILL);
  }

  /// For what mpirun's daemon or the wrappers have to say themselves.
  UniqueFd open_starter_output() {
    int ends[2];
    check_system(::pipe2(ends, O_CLOEXEC) == 0, "making a pipe");
    starter_output_ = BytePipe(UniqueFd(ends[0]), UniqueFd());
    return UniqueFd(ends[1]);
  }

  /// What is this host's own; it comes last, and so counts.
  void add_job_variables(SpawnRequest& request) const {
    request.set_env.insert(request.set_env.end(), {{kJobVariable, job_->path()},
                                                   {kLauncherVariable, "unix:" + job_->path() + "/launcher"},
                                                   {kHostNameVariable, name_},
                                                   {kJobSecretVariable, secret_.text()},
                                                   {flight::kDirectoryVariable, job_->shm_path() + "/flight"}});
  }

  void obey(const Hold&) {
    if (daemon_ > 0) ::kill(-daemon_, SIGSTOP);
  }
  void obey(const Ping& ping) {
    const auto now = Clock::now().time_since_epoch();
    send(Pong{ping.launcher_ns, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()});
  }
  /// Until it speaks again.
  void obey(const Pause&) { silent_at_ = Deadline::never(); }
  void obey(const Conclude&) {
    pass_on_all();
    end_job();
    send(Concluded{});
  }
  void obey(const Finish&) { ended_ = true; }
  template <class Other>
  void obey(const Other&) {
    throw MpiError("the launcher says what only a helper says");
  }

  void accept_ranks() {
    while (UniqueFd socket = accept_from(*listener_)) {
      ranks_[++last_id_] = pipe_of(std::move(socket));
      send(ConnectionOpened{last_id_});
    }
    while (const auto complaint = listener_->next_complaint())
      send(Notice{fmt::format("host {}: warning: {}", name_, *complaint)});
  }

  /// Passes on what has arrived from a rank, up to 64 KiB; how much that was.
  std::size_t pass_on(std::uint32_t id, BytePipe& rank) {
    const auto bytes = rank.receive();
    if (!bytes.empty()) send(FromRank{id, std::string(bytes)});
    if (rank.in() < 0) send(ConnectionClosed{id});
    return bytes.size();
  }

  void pass_starter_output() {
    const auto bytes = starter_output_.receive();
    if (!bytes.empty()) send(RunOutput{std::string(bytes)});
  }

  void take_signals() {
    while (const auto signal = signals_.next()) {
      if (signal->number != SIGCHLD) {
        ended_ = true;  // somebody wants this host's part to end
        continue;
      }
      collect_wrappers();
      int status = 0;
      if (daemon_ <= 0 || ::waitpid(daemon_, &status, WNOHANG) != daemon_) continue;
      ::kill(-daemon_, SIGKILL);  // what remains of it
      daemon_ = -1;
      pass_starter_output();
      send(RunEnded{exit_status_of(status)});
    }
  }

  void collect_wrappers() {
    std::erase_if(wrappers_, [this](const auto& wrapper) {
      int status = 0;
      if (::waitpid(wrapper.first, &status, WNOHANG) != wrapper.first) return false;
      pass_starter_output();
      send(RankEnded{wrapper.second, exit_status_of(status)});
      return true;
    });
  }

  /// Orderly or not: the job's attempt on this host ends here, and what the reaper finds ends with it.
  void end_job() {
    obey(EndRanks{});
    if (daemon_ > 0) ::kill(-daemon_, SIGKILL);
    // Those that are killed end at once; what they have to say is of no interest any more.
    if (daemon_ > 0) ::waitpid(std::exchange(daemon_, -1), nullptr, 0);
    for (const auto& [pid, rank] : wrappers_) ::waitpid(pid, nullptr, 0);
    wrappers_.clear();
    ranks_.clear();
    starter_output_.close();
    wrapper_output_.reset();
    listener_.reset();
    job_.reset();
  }

  /// What ranks that have ended have said.
  void pass_on_all() {
    for (auto& [id, rank] : ranks_) {
      std::size_t passed = 0;
      while (rank.in() >= 0 && passed < kSocketBytes) {
        const std::size_t more = pass_on(id, rank);
        if (more == 0) break;
        passed += more;
      }
    }
  }

  /// All that the ranks have said is on its way before this ends, for as long as the launcher takes some of it.
  void flush() {
    pass_on_all();
    while (launcher_.pending_bytes() > 0 && launcher_.out() >= 0) {
      pollfd entry = {launcher_.out(), POLLOUT, 0};
      const int ready = ::poll(&entry, 1, static_cast<int>(std::chrono::ceil<Millis>(silence_).count()));
      if (ready == 0) return;
      launcher_.flush();
    }
  }

  BytePipe launcher_;
  SignalQueue& signals_;
  HostDecoder decoder_;
  Clock::duration silence_ = kJobSetupTimeout;
  Deadline silent_at_ = Deadline::after(kJobSetupTimeout);
  std::string name_;
  std::optional<JobDir> job_;
  JobSecret secret_;
  std::optional<AuthenticatedListener> listener_;
  std::map<std::uint32_t, BytePipe> ranks_;  // connections of wrappers, by number
  std::uint32_t last_id_ = 0;
  pid_t daemon_ = -1;              // leads a process group
  std::map<pid_t, int> wrappers_;  // that this process has started, and their ranks
  BytePipe starter_output_;
  UniqueFd wrapper_output_;  // its other end, where wrappers are started
  std::string directory_;    // in which ranks start; empty: this process's
  bool ended_ = false;
};

}  // namespace

int host_helper(int gpus) {
  open_standard_fds();
  SignalQueue signals({SIGCHLD, SIGTERM, SIGINT, SIGHUP});
  BytePipe launcher = take_standard_streams();
  launcher.send(to_line(own_greeting(gpus)) + "\n");
  return Helper(std::move(launcher), signals).run();
}

}  // namespace lockstep::launcher
