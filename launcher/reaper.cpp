#include "launcher/reaper.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>

#include "base/deadline.h"
#include "base/text.h"
#include "base/unique_fd.h"
#include "launcher/job_dir.h"
#include "launcher/process.h"

namespace lockstep::launcher {
namespace {

constexpr int kSocket = STDERR_FILENO + 1;
constexpr auto kPause = Millis(5);

/// A new directory, mode 0700, whose name says whose it is: BASE/lockstep-USER-PID-XXXXXX with the launcher's pid.
/// Empty if BASE cannot be written.
std::string make_private_directory(const std::string& base, const std::string& owner) {
  std::string path = fmt::format("{}/lockstep-{}-XXXXXX", base, owner);
  return ::mkdtemp(path.data()) != nullptr ? path : std::string();
}

/// Removes symbolic links, never what they point to. True once it is gone.
bool remove_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  return !error;
}

std::string user_name() {
  const passwd* entry = ::getpwuid(::getuid());  // none for an arbitrary user id of a container
  return entry != nullptr ? entry->pw_name : std::to_string(::getuid());
}

bool environment_has(const std::string& pid, const std::string& mark) {
  const UniqueFd file(::open(fmt::format("/proc/{}/environ", pid).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return false;
  std::string text(1, '\0');
  char chunk[16 * 1024];
  for (ssize_t got; (got = ::read(file.get(), chunk, sizeof chunk)) > 0;)
    text.append(chunk, static_cast<std::size_t>(got));
  text += '\0';
  return text.find('\0' + mark + '\0') != std::string::npos;
}

/// Kills every process that carries the mark; returns whether there was one.
bool kill_marked(const std::string& mark) {
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), ::closedir);
  if (!proc) return false;
  bool found = false;
  while (const dirent* entry = ::readdir(proc.get())) {
    const auto pid = parse_int(entry->d_name);
    if (!pid || *pid == ::getpid()) continue;
    // The descriptor is taken first: it still refers to the same process if the number is reused.
    const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(*pid), 0)));
    if (!process || !environment_has(entry->d_name, mark)) continue;
    found = true;
    ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0);
  }
  return found;
}

void wait_for_end_of_file(int socket) {
  char ignored;
  ssize_t got;
  do got = ::read(socket, &ignored, 1);
  while (got > 0 || (got < 0 && errno == EINTR));
}

[[noreturn]] void reap(pid_t launcher, const std::string& tmp_base, const std::string& shm_base) {
  const std::string owner = fmt::format("{}-{}", user_name(), launcher);
  const std::string path = make_private_directory(tmp_base, owner);
  if (path.empty()) {
    const std::string failure = fmt::format("!{}", errno);
    [[maybe_unused]] const auto sent = ::write(kSocket, failure.data(), failure.size());
    ::_exit(0);
  }
  std::string shm_path = shm_base.empty() ? "" : make_private_directory(shm_base, owner);
  if (shm_path.empty()) shm_path = path;
  const std::string paths = path + "\n" + shm_path + "\n";
  [[maybe_unused]] const auto sent = ::write(kSocket, paths.data(), paths.size());

  wait_for_end_of_file(kSocket);

  const std::string mark = std::string(kJobVariable) + "=" + path;
  const Deadline deadline = Deadline::after_seconds(kReaperSeconds);
  const auto pause = [] { ::usleep(std::chrono::microseconds(kPause).count()); };
  // Processes that are killed take a moment to end, and start others until then.
  while (kill_marked(mark) && !deadline.expired()) pause();
  while (!remove_directory(path) || !remove_directory(shm_path)) {
    if (deadline.expired()) break;
    pause();
  }
  ::_exit(0);
}

}  // namespace

void start_reaper(int socket, const std::string& tmp_base, const std::string& shm_base) {
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  check_system(pid >= 0, "starting the reaper");
  if (pid > 0) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return;
  }
  // Its own session and no parent: neither the terminal's signals nor the end of the launcher's process group reach it.
  ::setsid();
  if (::fork() != 0) ::_exit(0);
  for (const int number : {SIGHUP, SIGINT, SIGTERM, SIGPIPE}) std::signal(number, SIG_IGN);
  ::prctl(PR_SET_NAME, "lockstep-reaper");
  if (::chdir("/") != 0 || ::dup2(socket, kSocket) < 0) ::_exit(1);
  ::closefrom(kSocket + 1);
  for (int fd = 0; fd < kSocket; ++fd) ::close(fd);
  open_standard_fds();
  reap(launcher, tmp_base, shm_base);
}

}  // namespace lockstep::launcher
