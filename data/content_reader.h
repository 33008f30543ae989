// Files that may be compressed by gzip: from front to back, or as an array in the IDX format, in which MNIST and its
// relatives come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

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

/// An array of unsigned bytes.
struct IdxArray {
  std::vector<std::uint64_t> dims;  // outermost first, none of them 0
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size_bytes = 0;    // the product of dims
  std::size_t header_bytes = 0;  // what precedes the data: file offset = header_bytes + offset in `bytes`

  std::span<const std::uint8_t> data() const { return {bytes.get(), size_bytes}; }
};

/// Reads `path`, plain or gzip-compressed (its content shows which), which must hold unsigned bytes in `dimensions`
/// dimensions and nothing else. The header is checked against the file's size before memory is allocated, so no more is
/// allocated than the file can hold. Throws IoError naming path and byte. In compressed files bytes count in the
/// uncompressed content, unless the message says otherwise.
IdxArray read_idx(const std::string& path, int dimensions);

}  // namespace lockstep::data
