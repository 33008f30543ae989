#include "data/content_reader.h"

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <optional>

#include "base/error.h"

namespace lockstep::data {

namespace {

constexpr std::uint8_t kUnsignedByte = 0x08;
// DEFLATE codes at most 258 bytes in 2 bits.
constexpr std::uint64_t kMostBytesPerCompressedByte = 1032;

[[noreturn]] void fail_cut(const std::string& path, std::uint64_t end, std::uint64_t expected) {
  throw IoError(fmt::format("{}: cut off: it ends at byte {}, {} bytes are needed", path, end, expected), kFetchAgain);
}

void check_magic(const std::string& path, const std::array<std::uint8_t, 4>& magic, int dimensions) {
  if (magic[0] != 0 || magic[1] != 0) {
    throw IoError(fmt::format("{}: not an IDX file: it starts with {:02x} {:02x}, not 00 00 (byte {})", path, magic[0],
                              magic[1], magic[0] != 0 ? 0 : 1),
                  kFetchAgain);
  }
  if (magic[2] != kUnsignedByte) {
    throw IoError(fmt::format("{}: data type {:#04x} (byte 2) is not unsigned bytes (0x08)", path, magic[2]),
                  "convert it to unsigned bytes, or fetch the file again");
  }
  if (magic[3] != dimensions) {
    throw IoError(fmt::format("{}: the number of dimensions (byte 3) is {}, not {}", path, magic[3], dimensions),
                  "images have 3 dimensions and labels 1: check that the files are not mixed up");
  }
}

/// How many bytes the file must have, header included, by the sizes in its header, which go to `array`; nothing: more
/// than 2^64.
std::optional<std::uint64_t> read_header(const std::string& path, ContentReader& reader, int dimensions,
                                         IdxArray& array) {
  std::array<std::uint8_t, 4> magic{};
  array.header_bytes = 4 + 4 * static_cast<std::size_t>(dimensions);
  if (const auto got = reader.read(magic.data(), magic.size()); got < magic.size()) {
    fail_cut(path, got, array.header_bytes);
  }
  check_magic(path, magic, dimensions);

  std::uint64_t expected = 1;
  bool overflow = false;
  for (int d = 0; d < dimensions; ++d) {
    const std::uint64_t at = 4 + 4 * static_cast<std::uint64_t>(d);
    std::array<std::uint8_t, 4> word{};
    if (const auto got = reader.read(word.data(), word.size()); got < word.size()) {
      fail_cut(path, at + got, array.header_bytes);
    }
    const std::uint64_t dim = std::uint64_t{word[0]} << 24 | std::uint64_t{word[1]} << 16 |
                              std::uint64_t{word[2]} << 8 | std::uint64_t{word[3]};
    if (dim == 0) {
      throw IoError(
          fmt::format("{}: {} (bytes {} to {})", path, d == 0 ? "it holds 0 samples" : "samples of size 0", at, at + 3),
          "give a file with at least one sample");
    }
    array.dims.push_back(dim);
    overflow |= __builtin_mul_overflow(expected, dim, &expected);
  }
  overflow |= __builtin_add_overflow(expected, array.header_bytes, &expected);
  return overflow ? std::nullopt : std::optional(expected);
}

void check_size(const std::string& path, const ContentReader& reader, const IdxArray& array,
                const std::optional<std::uint64_t>& expected) {
  if (reader.compressed()) {
    const std::uint64_t most =
        reader.file_bytes() <= std::numeric_limits<std::uint64_t>::max() / kMostBytesPerCompressedByte
            ? reader.file_bytes() * kMostBytesPerCompressedByte
            : std::numeric_limits<std::uint64_t>::max();
    if (!expected || *expected > most) {
      throw IoError(fmt::format("{}: cut off or malformed: the sizes in bytes 4 to {} promise more than its {} "
                                "compressed bytes can hold",
                                path, array.header_bytes - 1, reader.file_bytes()),
                    kFetchAgain);
    }
  } else if (!expected || *expected > reader.file_bytes()) {
    throw IoError(fmt::format("{}: cut off or malformed: it ends at byte {}, the sizes in bytes 4 to {} promise {}",
                              path, reader.file_bytes(), array.header_bytes - 1,
                              expected ? std::to_string(*expected) : "more than 2^64"),
                  kFetchAgain);
  }
}

}  // namespace

IdxArray read_idx(const std::string& path, int dimensions) {
  ContentReader reader(path);
  IdxArray array;
  const auto promised = read_header(path, reader, dimensions, array);
  check_size(path, reader, array, promised);
  const std::uint64_t expected = *promised;
  array.size_bytes = expected - array.header_bytes;
  // Not cleared: pages of a compressed file that lies about its size are never touched.
  array.bytes.reset(new (std::nothrow) std::uint8_t[array.size_bytes]);
  if (!array.bytes) throw IoError(fmt::format("{}: no memory for its {} bytes", path, array.size_bytes));
  if (const auto got = reader.read(array.bytes.get(), array.size_bytes); got < array.size_bytes) {
    fail_cut(path, array.header_bytes + got, expected);
  }
  // At the end of a compressed file this read is also what checks the checksum.
  std::uint8_t extra = 0;
  if (reader.read(&extra, 1) != 0) {
    throw IoError(
        fmt::format("{}: trailing bytes: the sizes in bytes 4 to {} say that it ends at byte {}, but there are more",
                    path, array.header_bytes - 1, expected),
        kFetchAgain);
  }
  return array;
}

}  // namespace lockstep::data
