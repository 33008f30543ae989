#include "data/tar_index.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

constexpr std::uint64_t kBlock = 512;
// A header that holds a name or a size of another one; GNU tar's and pax's own limits are far above.
constexpr std::uint64_t kMostHeader = 1 << 20;

// POSIX.1-1988's header ("ustar"), as far as it is read.
struct Field {
  std::size_t at, bytes;
};
constexpr Field kName = {0, 100}, kSize = {124, 12}, kChecksum = {148, 8}, kType = {156, 1}, kMagicEnd = {262, 1},
                kPrefix = {345, 155};

class Reader {
 public:
  Reader(const RandomAccessFile& archive, const std::function<void(const TarMember&)>& take)
      : archive_(archive), take_(take) {}

  void run() {
    refuse_compressed();
    if (archive_.size() == 0) fail(0, "the archive is empty");
    // Blocks of zeros end an archive. Another one may follow: archives are joined with cat.
    bool ended = false;
    std::uint64_t at = 0;
    while (at < archive_.size()) {
      if (archive_.size() - at < kBlock) fail(at, "the archive is cut in a header");
      const auto block = header_at(at);
      ended = std::ranges::all_of(block, [](std::byte byte) { return byte == std::byte{0}; });
      if (ended) {
        at += kBlock;
        continue;
      }
      std::memcpy(header_.data(), block.data(), kBlock);
      check(at);
      at = enter(at, at + kBlock);
    }
    if (!ended) fail(archive_.size(), "the archive is cut: the zeros that end it are missing");
  }

 private:
  [[noreturn]] void fail(std::uint64_t at, const std::string& why) const {
    throw IoError(fmt::format("{}, byte {}: {}", printable(archive_.path()), at, why),
                  "give whole tar files, not compressed, such as tar -cf makes");
  }

  std::string_view text(Field field) const {
    const std::string_view all(header_.data() + field.at, field.bytes);
    return all.substr(0, all.find('\0'));
  }

  void refuse_compressed() const {
    struct Magic {
      std::string_view begin;
      const char* name;
    };
    static constexpr std::array<Magic, 4> kMagics = {{{"\x1f\x8b", "gzip"},
                                                      {"\x28\xb5\x2f\xfd", "zstd"},
                                                      {"BZh", "bzip2"},
                                                      {"\xfd"
                                                       "7zXZ",
                                                       "xz"}}};
    const auto bytes = archive_.read(0, static_cast<std::size_t>(std::min<std::uint64_t>(archive_.size(), 8)));
    const std::string_view begin(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (const auto& [magic, name] : kMagics)
      if (begin.starts_with(magic))
        throw IoError(fmt::format("{}: it is compressed with {}, and samples are read in any order",
                                  printable(archive_.path()), name),
                      "unpack it to a plain .tar: images hardly get smaller");
  }

  // Small members follow each other closely: a read brings more than a header.
  std::span<const std::byte> header_at(std::uint64_t at) {
    constexpr std::size_t kAhead = 64 << 10;
    if (at < ahead_at_ || at + kBlock > ahead_at_ + ahead_.size()) {
      const auto bytes =
          archive_.read(at, static_cast<std::size_t>(std::min<std::uint64_t>(kAhead, archive_.size() - at)));
      ahead_.assign(bytes.begin(), bytes.end());
      ahead_at_ = at;
    }
    return std::span(ahead_).subspan(static_cast<std::size_t>(at - ahead_at_), kBlock);
  }

  void check(std::uint64_t at) const {
    // The sum of the header's bytes, with its own field as blanks; early writers added signed ones.
    std::int64_t sum = 0, signed_sum = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      const bool own = i >= kChecksum.at && i < kChecksum.at + kChecksum.bytes;
      const char byte = own ? ' ' : header_[i];
      sum += static_cast<unsigned char>(byte);
      signed_sum += static_cast<signed char>(byte);
    }
    const auto said = octal(text(kChecksum));
    if (!said || (static_cast<std::int64_t>(*said) != sum && static_cast<std::int64_t>(*said) != signed_sum))
      fail(at, at == 0 ? "it is no tar file" : "a header's checksum is wrong");
  }

  static std::optional<std::uint64_t> octal(std::string_view digits) {
    digits = trim(digits);
    std::uint64_t value = 0;
    for (const char digit : digits) {
      if (digit < '0' || digit > '7' || value >> 60 != 0) return std::nullopt;
      value = value * 8 + static_cast<std::uint64_t>(digit - '0');
    }
    return digits.empty() ? std::nullopt : std::optional(value);
  }

  static std::optional<std::uint64_t> number_of(std::string_view decimal) {
    const auto value = parse_int(decimal);
    return value && *value >= 0 ? std::optional(static_cast<std::uint64_t>(*value)) : std::nullopt;
  }

  std::uint64_t size_of_member(std::uint64_t at) const {
    if (pax_size_) return *pax_size_;
    // GNU's: the first bit set, then the number itself, the most significant byte first.
    if (static_cast<unsigned char>(header_[kSize.at]) == 0x80) {
      std::uint64_t value = 0;
      for (std::size_t i = 1; i < kSize.bytes; ++i) {
        if (value >> 55 != 0) fail(at, "a member is said to have too many bytes");
        value = value << 8 | static_cast<unsigned char>(header_[kSize.at + i]);
      }
      return value;
    }
    return plain_size(at);
  }

  /// Where the next header is.
  std::uint64_t enter(std::uint64_t at, std::uint64_t content) {
    const char type = header_[kType.at];
    const bool of_next = type == 'x' || type == 'g' || type == 'L' || type == 'K';
    const std::uint64_t bytes = of_next ? plain_size(at) : size_of_member(at);
    if (bytes > archive_.size() - content)
      fail(at, fmt::format("the archive is cut: {} has {} bytes, and {} follow", printable(std::string(member_name())),
                           bytes, archive_.size() - content));
    if (type == 'S') fail(at, fmt::format("{} is sparse", printable(std::string(member_name()))));
    if (of_next) {
      if (bytes > kMostHeader) fail(at, "a header is too long");
      take_header(type, at, content, bytes);
    } else {
      if (type == '0' || type == '\0' || type == '7') take_({.name = member_name(), .offset = content, .bytes = bytes});
      long_name_.clear();
      pax_size_.reset();
    }
    return content + (bytes + kBlock - 1) / kBlock * kBlock;
  }

  std::uint64_t plain_size(std::uint64_t at) const {
    const auto value = octal(text(kSize));
    if (!value) fail(at, "a size is no number");
    return *value;
  }

  void take_header(char type, std::uint64_t at, std::uint64_t content, std::uint64_t bytes) {
    const auto read = archive_.read(content, static_cast<std::size_t>(bytes));
    const std::string_view all(reinterpret_cast<const char*>(read.data()), read.size());
    if (type == 'L') long_name_ = all.substr(0, all.find('\0'));
    if (type == 'x') take_pax(at, all);
  }

  // Records "LENGTH KEY=VALUE\n" (POSIX.1-2001); LENGTH counts all of it.
  void take_pax(std::uint64_t at, std::string_view records) {
    while (!records.empty()) {
      const auto blank = records.find(' ');
      const auto length = blank == records.npos ? std::nullopt : number_of(records.substr(0, blank));
      if (!length || *length <= blank + 1 || *length > records.size() || records[*length - 1] != '\n')
        fail(at, "a pax header is corrupt");
      const std::string_view record = records.substr(blank + 1, *length - blank - 2);
      const auto equals = record.find('=');
      if (equals == record.npos) fail(at, "a pax header is corrupt");
      const std::string_view key = record.substr(0, equals), value = record.substr(equals + 1);
      if (key == "path") long_name_ = value;
      if (key.starts_with("GNU.sparse.")) fail(at, "a member is sparse");
      if (key == "size") {
        pax_size_ = number_of(value);
        if (!pax_size_) fail(at, "a pax header's size is no number");
      }
      records.remove_prefix(*length);
    }
  }

  std::string_view member_name() {
    if (!long_name_.empty()) return long_name_;
    name_ = text(kName);
    // GNU's own format, with a blank there, has other things in the prefix's place.
    if (const auto prefix = text(kPrefix); !prefix.empty() && header_[kMagicEnd.at] == '\0')
      name_ = std::string(prefix) + "/" + name_;
    return name_;
  }

  const RandomAccessFile& archive_;
  const std::function<void(const TarMember&)>& take_;
  std::vector<std::byte> ahead_;
  std::uint64_t ahead_at_ = 0;
  std::array<char, kBlock> header_{};
  std::string name_, long_name_;
  std::optional<std::uint64_t> pax_size_;
};

}  // namespace

void read_tar(const RandomAccessFile& archive, const std::function<void(const TarMember&)>& take) {
  Reader(archive, take).run();
}

}  // namespace lockstep::data
