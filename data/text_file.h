// Files of text as people have them, and what files of other kinds are.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/file.h"

namespace lockstep::data {

/// A whole file of text: as it is, decompressed where it is compressed by gzip, and in UTF-8 where it is UTF-16 with a
/// byte order mark. Its content shows that, not its name. A byte order mark is no part of the text.
class TextFile {
 public:
  /// Throws IoError naming the file for what cannot be read, for a compression or UTF-16 that breaks, for UTF-16
  /// without a byte order mark, for UTF-32, and for a file of another kind, as foreign_kind() has it.
  explicit TextFile(const std::string& path);
  /// The same of `content`, which comes from `source` and is no file: not compressed.
  TextFile(std::string content, const std::string& source);
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  std::string_view text() const { return text_; }

 private:
  void settle(const std::string& path);

  std::optional<MappedFile> file_;
  std::string converted_;
  std::string_view text_;
};

/// What a file is that begins with these bytes: "a NumPy array", "an archive of ZIP (or an Office document)". Nothing:
/// it has none of the known beginnings.
std::optional<std::string> foreign_kind(std::string_view beginning);

bool is_utf8(std::string_view text);
void append_utf8(std::string& text, char32_t code);

/// As a shell takes it for one word: 'a b'.
std::string shell_word(const std::string& text);
/// "convert it: COMMAND <FILE >NAME-FILE", as a shell takes it, with both files in one directory.
std::string convert_with(const std::string& command, const std::string& path, const std::string& name);

}  // namespace lockstep::data
