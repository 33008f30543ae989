#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace lockstep {

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_, ::getpid())) {
  struct stat there = {};
  if (::stat(path_.c_str(), &there) == 0) {
    if (!S_ISREG(there.st_mode))
      throw IoError(fmt::format("cannot replace {}: it is not a regular file", path_), "choose another path");
    if (::access(path_.c_str(), W_OK) != 0) fail("replace", errno);
  }
  fd_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd_) fail("create", errno);
}

AtomicFile::~AtomicFile() {
  if (fd_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) fail("flush", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename", errno);
  fd_.reset();
  // The rename itself is on the disk once the directory is.
  const auto slash = path_.find_last_of('/');
  const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  if (const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)); fd) ::fsync(fd.get());
}

bool is_same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  struct stat of_a = {}, of_b = {};
  const bool has_a = ::stat(a.c_str(), &of_a) == 0, has_b = ::stat(b.c_str(), &of_b) == 0;
  if (has_a && has_b) return of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
  std::error_code error;
  const auto resolved = [&](const std::string& path) {
    const fs::path whole = fs::weakly_canonical(fs::absolute(path, error), error);
    return error ? fs::path(path).lexically_normal() : whole;
  };
  return has_a == has_b && resolved(a) == resolved(b);
}

void AtomicFile::fail(const char* doing, int error_number) {
  throw IoError(fmt::format("cannot {} {}: {}", doing, path_, errno_text(error_number)),
                "choose a path in an existing, writable directory with free space");
}

}  // namespace lockstep
