#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
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

void AtomicFile::fail(const char* doing, int error_number) {
  throw IoError(fmt::format("cannot {} {}: {}", doing, path_, errno_text(error_number)),
                "choose a path in an existing, writable directory with free space");
}

}  // namespace lockstep
