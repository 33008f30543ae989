#include "checkpoint/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::checkpoint {
namespace {

/// What the file says of the run that holds it: "host NAME, pid 4711, since 2026-03-01 12:00:00 UTC".
std::string own_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("host {}, pid {}, since {:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC", host_name(), ::getpid(),
                     utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

std::string text_in(int fd) {
  std::array<char, 400> text{};
  const ssize_t got = ::pread(fd, text.data(), text.size(), 0);
  const std::string_view line(text.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return line.empty() ? "it does not say which" : printable(line.substr(0, line.find('\n')));
}

/// 0, or what is wrong; EAGAIN: another run has it.
int try_lock(int fd) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (::fcntl(fd, F_OFD_SETLK, &whole) == 0) return 0;
  return errno == EACCES ? EAGAIN : errno;
}

/// Whether the file is still the one of that name: its last owner removes it.
bool is_at(int fd, const std::string& path) {
  struct stat open_one = {}, named = {};
  return ::fstat(fd, &open_one) == 0 && ::stat(path.c_str(), &named) == 0 && open_one.st_dev == named.st_dev &&
         open_one.st_ino == named.st_ino;
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& directory, std::chrono::milliseconds here,
                             std::chrono::milliseconds elsewhere)
    : path_(directory + "/.lock") {
  using std::chrono::steady_clock;
  const auto begin = steady_clock::now();
  bool told = false;
  while (true) {
    UniqueFd fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!fd) return;  // whoever writes a checkpoint says why it cannot
    const int problem = try_lock(fd.get());
    if (problem == 0) {
      if (!is_at(fd.get(), path_)) continue;
      const std::string text = own_text() + "\n";
      // Without a text the lock is as good, and the next run says less.
      if (::ftruncate(fd.get(), 0) == 0) static_cast<void>(::pwrite(fd.get(), text.data(), text.size(), 0) > 0);
      fd_ = std::move(fd);
      return;
    }
    if (problem != EAGAIN) {
      log_warn("{}: its file system has no locks ({}): nothing keeps another run from using it at the same time",
               printable(directory), errno_text(problem));
      return;
    }
    const std::string owner = text_in(fd.get());
    const bool is_here = owner.starts_with(fmt::format("host {},", host_name()));
    if (steady_clock::now() - begin >= (is_here ? here : elsewhere))
      throw UsageError(fmt::format("another training writes its checkpoints to {}: {}", printable(directory), owner),
                       "choose another --checkpoint-dir, or end that training first");
    if (!std::exchange(told, true))
      log_info("{} is in use by another training ({}): waiting for its end", printable(directory), owner);
    throw_if_stopped("while it waited for a directory of checkpoints");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

DirectoryLock& DirectoryLock::operator=(DirectoryLock&& other) noexcept {
  if (this != &other) {
    release();
    path_ = std::move(other.path_);
    fd_ = std::move(other.fd_);
  }
  return *this;
}

void DirectoryLock::release() noexcept {
  if (!fd_) return;
  ::unlink(path_.c_str());  // before the lock ends: nobody else has one on this file
  fd_.reset();
}

}  // namespace lockstep::checkpoint
