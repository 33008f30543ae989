#include "launcher/job_dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <poll.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "base/error.h"
#include "base/kernel.h"
#include "base/scope.h"
#include "base/text.h"
#include "launcher/process.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

/// From the launcher's end to that of the reaper.
constexpr double kReaperSeconds = 1.5;

// The reaper.

constexpr int kSocket = STDERR_FILENO + 1;
constexpr auto kPause = Millis(5);

constexpr const char* kLock = "/lock";

/// A part of the lock on `directory`, which all processes that need it share; see Note [Cleaning up].
UniqueFd share_lock(const std::string& directory) {
  UniqueFd fd(::open((directory + kLock).c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (fd) ::flock(fd.get(), LOCK_SH | LOCK_NB);
  return fd;
}

/// A new directory, mode 0700, whose name says whose it is: BASE/lockstep-USER-PID-XXXXXX with the launcher's pid. It
/// has that name once it is locked, for as long as `lock`. Empty if BASE cannot be written.
std::string make_private_directory(const std::string& base, const std::string& owner, UniqueFd& lock) {
  std::string made = fmt::format("{}/.lockstep-{}-XXXXXX", base, owner);
  if (::mkdtemp(made.data()) == nullptr) return {};
  lock = share_lock(made);
  const std::string id = boot_id();
  [[maybe_unused]] const auto written = ::write(lock.get(), id.data(), id.size());
  const std::string path = fmt::format("{}/{}", base, made.substr(base.size() + 2));
  return ::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0 ? path : made;
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

/// Removes what jobs of this user have left in `base`, whose launcher and reaper were killed together. A job of another
/// host that shares `base`, or of another start of this one, has another boot id.
void remove_leftovers(const std::string& base) {
  const std::string start = fmt::format("lockstep-{}-", user_name()), id = boot_id();
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(base, failed), end; !failed && entry != end; entry.increment(failed)) {
    const std::string path = entry->path().string();
    struct stat status = {};
    if (!entry->path().filename().string().starts_with(start) || ::lstat(path.c_str(), &status) != 0 ||
        !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid())
      continue;
    const UniqueFd lock(::open((path + kLock).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    std::string found(64, '\0');
    const ssize_t length = lock ? ::read(lock.get(), found.data(), found.size()) : -1;
    found.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
    if (!id.empty() && found == id && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) remove_directory(path);
  }
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
  UniqueFd lock, shm_lock;  // until this process ends
  const std::string path = make_private_directory(tmp_base, owner, lock);
  if (path.empty()) {
    const std::string failure = fmt::format("!{}", errno);
    [[maybe_unused]] const auto sent = ::write(kSocket, failure.data(), failure.size());
    ::_exit(0);
  }
  std::string shm_path = shm_base.empty() ? "" : make_private_directory(shm_base, owner, shm_lock);
  if (shm_path.empty()) shm_path = path;
  const std::string paths = path + "\n" + shm_path + "\n";
  [[maybe_unused]] const auto sent = ::write(kSocket, paths.data(), paths.size());

  remove_leftovers(tmp_base);
  if (!shm_base.empty()) remove_leftovers(shm_base);
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

/// Forks the reaper (its own session, no open files but `socket`, working directory /) and returns in the caller.
/// The reaper first makes the directories and sends "path\nshm_path\n", or "!errno" if that failed.
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

// The launcher.

constexpr std::size_t kMaxTmpPathBytes = 60;  // socket paths end at 107 bytes
// Open MPI's segment of a rank takes 4 MiB and a bit; writing one on a full file system ends the rank by SIGBUS.
constexpr unsigned long long kShmBytesPerRank = 6 << 20;

bool is_directory(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

/// What the reaper says until it is silent: up to `lines` lines, or all it has to say before it ends.
std::string read_lines(int socket, int lines, Deadline deadline) {
  std::string text;
  for (;;) {
    const auto left = std::chrono::ceil<Millis>(deadline.remaining());
    pollfd entry = {socket, POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(left.count())) == 0) return text;
    char c;
    const ssize_t got = ::read(socket, &c, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return text;
    text += c;
    if (c == '\n' && --lines == 0) return text;
  }
}

std::string token_path(const std::string& directory) { return directory + "/token"; }

}  // namespace

std::string job_tmp_base() {
  const auto wanted = env("TMPDIR").value_or("");
  return wanted.starts_with('/') && wanted.size() <= kMaxTmpPathBytes && is_directory(wanted) ? wanted : "/tmp";
}

std::string job_shm_base(int ranks) {
  constexpr const char* kPath = "/dev/shm";
  struct statvfs space = {};
  const bool room = ::statvfs(kPath, &space) == 0 && static_cast<unsigned long long>(space.f_bavail) * space.f_frsize >=
                                                         kShmBytesPerRank * static_cast<unsigned>(ranks);
  return room && ::access(kPath, W_OK | X_OK) == 0 ? kPath : "";
}

JobDir::JobDir(const std::string& tmp_base, const std::string& shm_base) {
  int ends[2];
  check_system(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "making a socket pair");
  reaper_.reset(ends[0]);
  UniqueFd theirs(ends[1]);
  start_reaper(theirs.get(), tmp_base, shm_base);
  theirs.reset();
  const auto answer = split(read_lines(reaper_.get(), 2, Deadline::after_seconds(10)), '\n');
  if (answer.size() == 3) {
    path_ = answer[0];
    shm_path_ = answer[1];
    lock_ = share_lock(path_);
    shm_lock_ = share_lock(shm_path_);
    return;
  }
  const auto error = answer[0].starts_with("!") ? parse_int(answer[0].substr(1)) : std::nullopt;
  throw DeviceError(fmt::format("cannot make a job directory in {}: {}", tmp_base,
                                error ? errno_text(static_cast<int>(*error)) : "the cleaning process did not start"),
                    "set TMPDIR to a local directory that can be written");
}

JobDir::~JobDir() {
  ::shutdown(reaper_.get(), SHUT_WR);
  read_lines(reaper_.get(), 1, Deadline::after_seconds(kReaperSeconds + 0.5));
  // Normally gone by now; somebody may have killed the reaper.
  std::error_code ignored;
  for (const auto& path : {path_, shm_path_}) std::filesystem::remove_all(path, ignored);
}

void write_token(const std::string& directory, const std::string& token) {
  std::ofstream file(token_path(directory));
  file << token << std::flush;
  check_system(bool(file), "writing to " + directory);
}

void remove_stale_dirs(const std::string& directory, const std::string& token) {
  std::ifstream file(token_path(directory));
  if (token.empty() || std::string(std::istreambuf_iterator<char>(file), {}) != token) return;
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
}

}  // namespace lockstep::launcher
