// What is done to files: what of it is on the disk, and what a loss of power may take (world.h: Note [Disks]).
#include <fcntl.h>
#include <sys/stat.h>

#include <cstdarg>

#include "process.h"

using namespace lockstep::simulation;

namespace {

bool exists(const char* path) {
  struct stat status;
  return raw_syscall(SYS_lstat, reinterpret_cast<long>(path), reinterpret_cast<long>(&status)) == 0;
}
bool is_kept(const char* path) { return simulated() && std::strncmp(path, "/tmp/", 5) == 0; }

void copy(const char* from, const char* to) {
  const long in = raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(from), O_RDONLY | O_CLOEXEC);
  if (in < 0) return;
  const long out =
      raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(to), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  char bytes[65536];
  for (long got; (got = raw_syscall(SYS_read, in, reinterpret_cast<long>(bytes), sizeof bytes)) > 0;)
    raw_syscall(SYS_write, out, reinterpret_cast<long>(bytes), got);
  raw_syscall(SYS_close, in);
  raw_syscall(SYS_close, out);
}

/// Notes what is about to be done. `lost` is a file that it removes, or nullptr.
void keep(DiskChange kind, const char* from, const char* to, const char* lost) {
  if (world->disk_count == kMostDiskSteps) World::fail("simulation: too many changes of files\n");
  DiskStep& step = world->disk[world->disk_count++];
  step = {.kind = kind, .kept = 0, .from = {}, .to = {}};
  std::strncpy(step.from, from, sizeof step.from - 1);
  if (to != nullptr) std::strncpy(step.to, to, sizeof step.to - 1);
  if (lost == nullptr || !exists(lost)) return;
  step.kept = ++world->kept_count;
  char path[64];
  std::snprintf(path, sizeof path, kKeptPath, step.kept);
  copy(lost, path);
}

/// What has failed has changed nothing.
int done(long result) {
  if (result < 0) --world->disk_count;
  return static_cast<int>(result_of(result));
}

int open_at(long directory, const char* path, int flags, unsigned mode) {
  const bool makes = (flags & O_CREAT) != 0 && directory == AT_FDCWD && is_kept(path) && !exists(path);
  if (makes) keep(DiskChange::kCreate, path, nullptr, nullptr);
  const long fd = raw_syscall(SYS_openat, directory, reinterpret_cast<long>(path), flags, mode);
  return makes ? done(fd) : static_cast<int>(result_of(fd));
}

unsigned mode_of(int flags, va_list arguments) { return (flags & O_CREAT) != 0 ? va_arg(arguments, unsigned) : 0; }

/// Of names below an open directory.
void full_path(int directory, const char* name, char (&path)[512]) {
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
  long length = directory == AT_FDCWD || name[0] == '/' ? 0
                                                        : raw_syscall(SYS_readlink, reinterpret_cast<long>(link),
                                                                      reinterpret_cast<long>(path), sizeof path - 1);
  if (length < 0) length = 0;
  std::snprintf(path + length, sizeof path - static_cast<std::size_t>(length), "%s%s", length > 0 ? "/" : "", name);
}

int remove_name(int directory, const char* name, int flags) {
  if (!simulated())
    return static_cast<int>(result_of(raw_syscall(SYS_unlinkat, directory, reinterpret_cast<long>(name), flags)));
  maybe_pass("unlink");
  char path[512];
  full_path(directory, name, path);
  const bool noted = is_kept(path) && exists(path);
  if (noted) {
    const bool is_directory = (flags & AT_REMOVEDIR) != 0;
    keep(is_directory ? DiskChange::kRemoveDirectory : DiskChange::kRemove, path, nullptr,
         is_directory ? nullptr : path);
  }
  const long result = raw_syscall(SYS_unlinkat, directory, reinterpret_cast<long>(name), flags);
  return noted ? done(result) : static_cast<int>(result_of(result));
}

}  // namespace

namespace lockstep::simulation {

bool is_full(int fd) {
  struct stat status;
  char link[64], path[512];
  if (!simulated() || world->now >= world->full_until ||
      raw_syscall(SYS_fstat, fd, reinterpret_cast<long>(&status)) < 0 || !S_ISREG(status.st_mode))
    return false;
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const long length =
      raw_syscall(SYS_readlink, reinterpret_cast<long>(link), reinterpret_cast<long>(path), sizeof path - 1);
  path[length > 0 ? length : 0] = '\0';
  return is_kept(path);
}

}  // namespace lockstep::simulation

extern "C" {

ssize_t pwrite(int fd, const void* bytes, std::size_t count, off_t at) {
  if (is_full(fd)) {
    errno = ENOSPC;
    return -1;
  }
  return result_of(raw_syscall(SYS_pwrite64, fd, reinterpret_cast<long>(bytes), static_cast<long>(count), at));
}
int posix_fallocate(int fd, off_t at, off_t count) {
  if (is_full(fd)) return ENOSPC;
  return static_cast<int>(-raw_syscall(SYS_fallocate, fd, 0, at, count));
}
int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_at(directory, path, flags, mode);
}
int mkdir(const char* path, mode_t mode) noexcept {
  const bool noted = is_kept(path) && !exists(path);
  if (noted) keep(DiskChange::kMakeDirectory, path, nullptr, nullptr);
  const long result = raw_syscall(SYS_mkdir, reinterpret_cast<long>(path), mode);
  return noted ? done(result) : static_cast<int>(result_of(result));
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to, unsigned flags) noexcept {
  if (simulated()) maybe_pass("rename");
  const bool noted = is_kept(from) || is_kept(to), exchanges = (flags & RENAME_EXCHANGE) != 0;
  struct stat status = {};
  const bool replaces = raw_syscall(SYS_lstat, reinterpret_cast<long>(to), reinterpret_cast<long>(&status)) == 0 &&
                        S_ISREG(status.st_mode);
  if (noted)
    keep(exchanges ? DiskChange::kExchange : DiskChange::kRename, from, to, !exchanges && replaces ? to : nullptr);
  const long result = raw_syscall(SYS_renameat2, from_directory, reinterpret_cast<long>(from), to_directory,
                                  reinterpret_cast<long>(to), flags);
  return noted ? done(result) : static_cast<int>(result_of(result));
}
int rename(const char* from, const char* to) noexcept { return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int unlink(const char* path) noexcept { return remove_name(AT_FDCWD, path, 0); }
int unlinkat(int directory, const char* path, int flags) noexcept { return remove_name(directory, path, flags); }
int rmdir(const char* path) noexcept { return remove_name(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) noexcept {
  const int code = ::unlink(path);
  return code != 0 && errno == EISDIR ? ::rmdir(path) : code;
}
int fsync(int fd) {
  if (!simulated()) return static_cast<int>(result_of(raw_syscall(SYS_fsync, fd)));
  maybe_pass("fsync");
  struct stat status;
  const long found = raw_syscall(SYS_fstat, fd, reinterpret_cast<long>(&status));
  if (found < 0) return static_cast<int>(result_of(found));
  if (S_ISREG(status.st_mode)) {
    char from[64], to[64];
    std::snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    std::snprintf(to, sizeof to, kDurablePath, static_cast<unsigned long>(status.st_ino));
    copy(from, to);
  }
  world->disk_synced = world->disk_count;
  return 0;
}
int fdatasync(int fd) { return ::fsync(fd); }

}  // extern "C"
