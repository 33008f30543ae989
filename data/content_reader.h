// Files that may be compressed by gzip, from front to back.
#pragma once

#include <cstdint>
#include <string>

struct gzFile_s;

namespace lockstep::data {

inline constexpr const char* kFetchAgain = "fetch the file again, or compare its size and checksum with the source's";

/// The content of a file, decompressed if it is compressed: its content shows that, not its name. One thread uses it.
class ContentReader {
 public:
  /// Throws IoError naming the file for what cannot be read and for an empty one.
  explicit ContentReader(const std::string& path);
  ~ContentReader();
  ContentReader(const ContentReader&) = delete;
  ContentReader& operator=(const ContentReader&) = delete;

  std::uint64_t file_bytes() const { return file_bytes_; }
  /// Known after the first read.
  bool compressed() const;

  /// Reads up to `count` bytes; fewer at the end of the content. Throws IoError where the file or its compression
  /// breaks.
  std::uint64_t read(std::uint8_t* out, std::uint64_t count);
  /// What is left.
  std::string read_all();

 private:
  std::string path_;
  gzFile_s* file_ = nullptr;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace lockstep::data
