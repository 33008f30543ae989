// From text to tokens and back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

/// What the numbers of a text's tokens mean. Immutable; several threads may use one.
class Vocabulary {
 public:
  virtual ~Vocabulary() = default;

  /// Tokens lie in [0, size()).
  virtual int size() const = 0;
  /// `text` is UTF-8: else, and for what is not in the vocabulary, IoError naming `source` and the byte.
  virtual std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const = 0;
  /// Bytes, which a token may end in the middle of a character.
  virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
  /// Of all that decides what a text becomes; empty: its size says it.
  virtual std::string sha256() const { return {}; }
  /// The token that stands between texts, if there is one.
  virtual std::optional<std::int32_t> end_of_text() const { return std::nullopt; }
};

/// Tokens as people write numbers: "12 7 9". For models of tokens whose vocabulary nobody has given.
class TokenNumbers final : public Vocabulary {
 public:
  explicit TokenNumbers(int size) : size_(size) {}
  int size() const override { return size_; }
  /// Numbers with blanks or commas between them.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  /// Each after a blank.
  std::string decode(std::span<const std::int32_t> tokens) const override;

 private:
  int size_;
};

/// Makes whole characters of bytes that come piece by piece: what is given out is UTF-8 always, and no character is
/// cut. Bytes that cannot be part of any come as U+FFFD, one for each longest beginning of a character (Unicode 15,
/// section 3.9, as Python's errors="replace").
class Utf8Joiner {
 public:
  /// The characters that are complete with these bytes.
  std::string add(std::string_view bytes);
  /// What is left, at the end.
  std::string finish();

 private:
  std::string held_;  // the beginning of a character
};

/// Byte-level byte-pair encoding (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword
/// Units", 2016; Radford et al., 2019) from the two files that GPT-2 comes with. Any text can be encoded, and comes
/// back as it was. Immutable; several threads may use one.
class BytePairs final : public Vocabulary {
 public:
  /// vocab.json: an object from tokens to their numbers, 0 to N − 1; merges.txt: one pair per line, the likelier ones
  /// first, after a line that starts with #version. Files beside vocab.json may add tokens (read_tokenizer_files()).
  /// Or a tokenizer.json, which has both; the path of the merges is then empty. Where it is empty for a vocab.json, it
  /// is merges.txt beside that. Throws IoError naming file and line or byte, and for merges that do not make all tokens
  /// of the vocabulary; UsageError for merges beside a tokenizer.json.
  explicit BytePairs(const std::string& vocabulary_path, const std::string& merges_path = {});
  /// The files of such a vocabulary, as they are called (of those beside it: tokenizer_config.json), with their paths.
  static std::vector<std::pair<std::string, std::string>> files_of(const std::string& vocabulary_path,
                                                                   const std::string& merges_path);
  ~BytePairs() override;
  BytePairs(const BytePairs&) = delete;
  BytePairs& operator=(const BytePairs&) = delete;

  int size() const override;
  /// "<|endoftext|>" in a text is that token, and so are the names of added ones.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  std::string decode(std::span<const std::int32_t> tokens) const override;
  std::string sha256() const override;
  /// <|endoftext|>
  std::optional<std::int32_t> end_of_text() const override;

 private:
  struct Tables;
  std::unique_ptr<const Tables> tables_;
};

}  // namespace lockstep::data
