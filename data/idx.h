// Files in the IDX format, in which MNIST and its relatives come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lockstep::data {

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
