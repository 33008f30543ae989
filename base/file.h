// Files: written whole or not at all, as memory, and read in parts for as long as a run takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/scope.h"

namespace lockstep {

/// A file that is open for reading, or why it cannot be.
struct RegularFile {
  UniqueFd fd;
  std::uint64_t size = 0;
  std::string problem = {};  // "No such file or directory", "is a directory", "not a regular file", "is a Git LFS …"
  std::string remedy = {};   // that helps with just this problem, if any does

  /// Fills `bytes` from front to back; `count` is smaller where the file ends. Returns what went wrong, or nothing.
  std::string read(std::span<std::byte> bytes, std::size_t& count);
  std::string remedy_or(const char* own) const { return remedy.empty() ? own : remedy; }
};
RegularFile open_regular(const std::string& path);

/// Writes to a temporary name beside `path`, or what that leads to by links; commit() flushes it to the disk and
/// renames it. Without commit the temporary file is removed and `path` is untouched. Throws IoError naming the file.
/// Not thread-safe.
class AtomicFile {
 public:
  /// Throws for all that can be known in advance: a directory that is missing or cannot be written, a `path` that is
  /// write-protected or no regular file. (The rename would put a file in the place of a device such as /dev/null.)
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* doing, int error_number);

  std::string path_, temporary_;
  UniqueFd fd_;
};

/// All of a file, as AtomicFile writes it. Throws IoError naming the file.
void write_whole_file(const std::string& path, std::string_view text);

/// Whether both names lead to one file: by device and inode where both are there, else by the paths with links and dots
/// resolved.
bool is_same_file(const std::string& a, const std::string& b);

/// A whole regular file, read-only. Pages are read when they are touched. If somebody truncates the file while it is
/// mapped, SIGBUS kills this process. So it is for files that are read once and closed; files that stay in use are
/// RandomAccessFiles. Movable; any thread may read.
class MappedFile {
 public:
  /// Throws IoError naming the file.
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;  // nullptr: an empty file
  std::uint64_t size_ = 0;
};

/// Note [Read, not mapped]
/// A mapping would be as fast for samples of some kilobytes. But if somebody truncates a file during a run of hours,
/// SIGBUS would end the run without naming the file. A read that comes up short is an error like any other; the kernel
/// keeps the pages in memory all the same.
///
/// A regular file, read-only. Movable; any thread may read.
class RandomAccessFile {
 public:
  /// Throws IoError naming the file.
  explicit RandomAccessFile(std::string path);

  const std::string& path() const { return path_; }
  /// In bytes, when it was opened.
  std::uint64_t size() const { return size_; }

  /// `count` bytes from `offset` on, in memory of the calling thread that its next read(), of whichever file,
  /// overwrites. Throws IoError, also where the file has been cut since it was opened.
  std::span<const std::byte> read(std::uint64_t offset, std::size_t count) const;

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  UniqueFd fd_;
};

}  // namespace lockstep
