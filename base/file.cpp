#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/scope.h"

namespace lockstep {
namespace {

constexpr const char* kAnother = "give another file";

[[noreturn]] void refuse(const std::string& path, const std::string& why, const std::string& remedy = kAnother) {
  throw IoError(fmt::format("{}: {}", path, why), remedy);
}

UniqueFd open_or_refuse(const std::string& path, std::uint64_t& size) {
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) refuse(path, file.problem, file.remedy_or(kAnother));
  size = file.size;
  return std::move(file.fd);
}

/// What git leaves in a file's place where git-lfs is not installed or has not fetched it
/// (git-lfs, docs/spec.md: less than 1,024 bytes; until 2014 under another name).
bool is_lfs_pointer(int fd, std::uint64_t size) {
  constexpr std::uint64_t kLessThan = 1024;
  constexpr std::string_view kStarts[] = {"version https://git-lfs.github.com/", "version https://hawser.github.com/"};
  if (size >= kLessThan) return false;
  char read[64] = {};
  const ssize_t length = ::pread(fd, read, sizeof read, 0);
  const std::string_view found(read, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return std::ranges::any_of(kStarts, [&](std::string_view start) { return found.starts_with(start); });
}

}  // namespace

RegularFile open_regular(const std::string& path) {
  // Without O_NONBLOCK a named pipe would block here for ever.
  RegularFile file{.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
  struct stat status = {};
  if (!file.fd || ::fstat(file.fd.get(), &status) != 0)
    file.problem = errno_text(errno);
  else if (!S_ISREG(status.st_mode))
    file.problem = S_ISDIR(status.st_mode) ? "is a directory" : "not a regular file";
  else
    file.size = static_cast<std::uint64_t>(status.st_size);
  if (file.problem.empty() && is_lfs_pointer(file.fd.get(), file.size)) {
    file.problem = "is a Git LFS pointer, and not the file that it stands for";
    file.remedy = "fetch that with git lfs pull";
  }
  return file;
}

std::string RegularFile::read(std::span<std::byte> bytes, std::size_t& count) {
  for (count = 0; count < bytes.size();) {
    const ssize_t got = ::read(fd.get(), bytes.data() + count, bytes.size() - count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_text(errno);
    if (got == 0) break;
    count += static_cast<std::size_t>(got);
  }
  return {};
}

namespace {

// What `path` leads to by links, whether that is there or not: a rename would put the file in the place of the link.
std::string behind_links(std::string path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as the kernel follows
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, error); ++i) {
    const fs::path to = fs::read_symlink(path, error);
    if (error) break;
    path = to.is_absolute() ? to.string() : (fs::path(path).parent_path() / to).string();
  }
  return path;
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(behind_links(std::move(path))), temporary_(fmt::format("{}.tmp-{}", path_, ::getpid())) {
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

void write_whole_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
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

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const UniqueFd fd = open_or_refuse(path_, size_);
  if (size_ == 0) return;
  void* const mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) refuse(path_, errno_text(errno));
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

RandomAccessFile::RandomAccessFile(std::string path) : path_(std::move(path)), fd_(open_or_refuse(path_, size_)) {}

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
