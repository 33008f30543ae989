// A file's content as memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// A whole regular file, read-only. Pages are read when they are touched. Who cuts the file short while it is mapped
/// gets this process killed by SIGBUS: for files that are read once and closed; those that stay in use are
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
  std::size_t size_ = 0;
};

}  // namespace lockstep
