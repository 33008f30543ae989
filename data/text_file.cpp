#include "data/text_file.h"

#include <utf8proc.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "data/content_reader.h"

namespace lockstep::data {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kGzip = "\x1f\x8b"sv, kLittle16 = "\xff\xfe"sv, kBig16 = "\xfe\xff"sv;
constexpr std::string_view kMark8 = "\xEF\xBB\xBF"sv;  // of UTF-8, which spreadsheets and editors put first

std::string iconv(const std::string& from, const std::string& path) {
  return convert_with(fmt::format("iconv -f {} -t UTF-8", from), path, "utf8");
}

std::string from_utf16(std::string_view bytes, bool little, const std::string& path) {
  const auto unit = [&](std::size_t at) {
    const auto low = static_cast<unsigned char>(bytes[at + (little ? 0 : 1)]);
    const auto high = static_cast<unsigned char>(bytes[at + (little ? 1 : 0)]);
    return static_cast<char32_t>(high << 8 | low);
  };
  std::string text;
  text.reserve(bytes.size() / 2);
  for (std::size_t at = 2; at < bytes.size(); at += 2) {
    const auto refuse = [&](const char* why) {
      throw IoError(
          fmt::format("{}: byte {} is not UTF-16, as its first two bytes promise: {}", printable(path), at, why),
          "fetch or save the file again");
    };
    if (at + 2 > bytes.size()) refuse("half a character");
    char32_t code = unit(at);
    if (code >= 0xDC00 && code < 0xE000) refuse("the second half of a pair");
    if (code >= 0xD800 && code < 0xDC00) {
      const char32_t second = at + 4 <= bytes.size() ? unit(at + 2) : 0;
      if (second < 0xDC00 || second >= 0xE000) refuse("the first half of a pair alone");
      code = 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00);
      at += 2;
    }
    append_utf8(text, code);
  }
  return text;
}

// "UTF-16LE": every other byte of a text of mostly Latin letters is 0. nullptr: it is something else.
const char* utf16_without_mark(std::string_view bytes) {
  const std::string_view head = bytes.substr(0, 1024);
  std::size_t zeros[2] = {0, 0};
  for (std::size_t i = 0; i < head.size(); ++i)
    if (head[i] == '\0') ++zeros[i % 2];
  if (zeros[0] + zeros[1] < 2 || 4 * (zeros[0] + zeros[1]) < head.size()) return nullptr;
  return zeros[1] >= zeros[0] ? "UTF-16LE" : "UTF-16BE";
}

}  // namespace

std::optional<std::string> foreign_kind(std::string_view beginning) {
  static constexpr std::pair<std::string_view, const char*> kKinds[] = {
      {kGzip, "compressed by gzip"},
      {"BZh91AY&SY"sv, "compressed by bzip2"},
      {"\xfd\x37zXZ\0"sv, "compressed by xz"},
      {"\x28\xb5\x2f\xfd"sv, "compressed by zstd"},
      {"PK\x03\x04"sv, "a ZIP archive, or a document of an office program"},
      {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "a document of an office program"},
      {"%PDF-"sv, "a PDF document"},
      {"\x93NUMPY"sv, "a NumPy array"},
      {"PAR1\x15"sv, "a Parquet table"},
      {"ARROW1\0\0"sv, "a Feather table"},
      {"SQLite format 3\0"sv, "a database of SQLite"},
      {"MMIDIDX\0\0"sv, "an index of Megatron-LM, which names the tokens of another file"},
      {"LITPKDS"sv, "a packed data set of LitGPT"},
  };
  for (const auto& [magic, kind] : kKinds)
    if (beginning.starts_with(magic)) return kind;
  return std::nullopt;
}

TextFile::TextFile(const std::string& path) : file_(path), text_(file_->text()) {
  if (text_.starts_with(kGzip)) {
    converted_ = ContentReader(path).read_all();
    text_ = converted_;
  }
  settle(path);
}

TextFile::TextFile(std::string content, const std::string& source) : converted_(std::move(content)), text_(converted_) {
  settle(source);
}

void TextFile::settle(const std::string& path) {
  if (const auto kind = foreign_kind(text_))
    throw IoError(fmt::format("{}: it is {}, not a text", printable(path), *kind),
                  "give plain text in UTF-8 (tables as .csv or .tsv), as it is or compressed by gzip");
  const bool little = text_.starts_with(kLittle16);
  if (text_.starts_with("\xff\xfe\0\0"sv) || text_.starts_with("\0\0\xfe\xff"sv))
    throw IoError(fmt::format("{}: it is UTF-32", printable(path)), iconv("UTF-32", path));
  if (little || text_.starts_with(kBig16)) {
    std::string text = from_utf16(text_, little, path);
    converted_ = std::move(text);
    text_ = converted_;
  } else if (const char* const name = utf16_without_mark(text_)) {
    throw IoError(fmt::format("{}: it has bytes of 0 as UTF-16 has, and no byte order mark", printable(path)),
                  iconv(name, path));
  }
  if (text_.starts_with(kMark8)) text_.remove_prefix(kMark8.size());
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    utf8proc_int32_t code = 0;
    const auto length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                         static_cast<utf8proc_ssize_t>(text.size()), &code);
    if (length <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(length));
  }
  return true;
}

void append_utf8(std::string& text, char32_t code) {
  const auto put = [&](char32_t bits) { text += static_cast<char>(bits); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

std::string convert_with(const std::string& command, const std::string& path, const std::string& name) {
  const std::filesystem::path file(path);
  const auto made = std::filesystem::path(path).replace_filename(name + "-" + file.filename().string());
  return fmt::format("convert it: {} <{} >{}", command, shell_word(path), shell_word(made.string()));
}

std::string shell_word(const std::string& text) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-./,:=+@%").find(c) != std::string_view::npos || static_cast<unsigned char>(c) >= 0x80;
  };
  if (!text.empty() && std::ranges::all_of(text, is_plain)) return text;
  std::string word = "'";
  for (const char c : printable(text)) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

}  // namespace lockstep::data
