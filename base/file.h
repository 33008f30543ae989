// Files that are written whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/unique_fd.h"

namespace lockstep {

/// Writes to a temporary name beside `path`; commit() flushes it to the disk and renames it. Without commit the
/// temporary file is removed and `path` is untouched. Throws IoError naming the file. Not thread-safe.
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

/// Whether both names lead to one file: by device and inode where both are there, else by the paths with links and dots
/// resolved.
bool is_same_file(const std::string& a, const std::string& b);

}  // namespace lockstep
