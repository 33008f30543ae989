#include "base/random_access_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lockstep {

RandomAccessFile::RandomAccessFile(std::string path) : path_(std::move(path)) {
  const auto refuse = [&](const std::string& why) {
    throw IoError(fmt::format("{}: {}", path_, why), "give another file");
  };
  // Without O_NONBLOCK a named pipe would block here for ever.
  fd_.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) refuse(errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse(S_ISDIR(status.st_mode) ? "is a directory" : "not a regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
}

std::span<const std::byte> RandomAccessFile::read(std::uint64_t offset, std::size_t count) const {
  thread_local std::vector<std::byte> buffer;  // what a training step reads allocates nothing
  if (buffer.size() < count) buffer.resize(count);
  for (std::size_t done = 0; done < count;) {
    const std::uint64_t at = offset + done;
    const ssize_t got = ::pread(fd_.get(), buffer.data() + done, count - done, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw IoError(fmt::format("{}: cannot read byte {}: {}", path_, at, errno_text(errno)),
                    "check the disk that it is on");
    if (got == 0)
      throw IoError(
          fmt::format("{}: it had {} bytes when it was opened, and now ends at byte {} or before", path_, size_, at),
          "leave files alone that are in use: write a new one under another name, and rename that");
    done += static_cast<std::size_t>(got);
  }
  return std::span<const std::byte>(buffer).first(count);
}

}  // namespace lockstep
