#include "launcher/job_dir.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/deadline.h"
#include "base/env.h"
#include "base/error.h"
#include "base/text.h"
#include "launcher/process.h"
#include "launcher/reaper.h"

namespace lockstep::launcher {
namespace {

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

}  // namespace lockstep::launcher
