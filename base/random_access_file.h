// A file of which parts are read, for as long as a run takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/unique_fd.h"

namespace lockstep {

/// Note [Read, not mapped]
/// A mapping would be as fast for samples of some kilobytes, but a file that somebody cuts while a run of hours uses it
/// would end that by SIGBUS, with no word of which file it was. A read that comes up short is an error like any other;
/// the kernel keeps the pages in memory all the same.
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
  UniqueFd fd_;
  std::uint64_t size_ = 0;
};

}  // namespace lockstep
